"""A connection that is closed at any moment leaves no socket open."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from support.proxy import proxy
from support.queue.queues import Queue
from support.waiting import eventually

from leanq import UnavailableError
from leanq.queue.connection import Address, Link
from leanq.queue.settings import Settings

_DEADLINE_S = 60.0


async def test_who_connects_while_it_is_closed_stays_closed(
    settings: Settings, tmp_path: Path
) -> None:
    async with proxy(settings, tmp_path) as (through, way):
        way.lets_in.clear()
        link = Link(Address(through.url))
        # One connects, and the others wait for their turn.
        calls = [asyncio.create_task(link.ask(("PING",))) for _ in range(3)]
        await eventually(lambda: way.connections == 1)
        await link.close()
        way.lets_in.set()
        async with asyncio.timeout(_DEADLINE_S):
            ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [UnavailableError] * 3
        assert {"closed meanwhile" in str(end) for end in ends} == {True}
        await eventually(lambda: way.connections == 0)
        # Whoever calls after that meant to.
        assert await link.ask(("PING",)) == [b"PONG"]
        await link.close()
        await eventually(lambda: way.connections == 0)


async def test_a_connection_that_has_ended_is_made_anew(settings: Settings, tmp_path: Path) -> None:
    async with proxy(settings, tmp_path) as (through, way):
        link = Link(Address(through.url))
        assert await link.ask(("PING",)) == [b"PONG"]
        # A connection that was made later hears of its end later.
        reader, writer = await asyncio.open_unix_connection(str(way.place))
        await eventually(lambda: way.connections == 2)
        await way.close()
        async with asyncio.timeout(_DEADLINE_S):
            assert await reader.read() == b""
        writer.close()
        assert await link.ask(("PING",)) == [b"PONG"]
        await link.close()


@pytest.mark.slow
@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_closing_that_is_cancelled_goes_to_its_end(
    settings: Settings, tmp_path: Path, turns: int
) -> None:
    async with proxy(settings, tmp_path) as (through, way):
        queue = Queue(through)
        await queue.ping()
        await queue.read_inbox("client", "0-0", 1)
        assert way.connections == 2
        closing = asyncio.create_task(queue.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        # A connection that was dropped would be closed by the collector, which warns.
        gc.collect()
        await eventually(lambda: way.connections == 0)
