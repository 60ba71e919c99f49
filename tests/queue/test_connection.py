"""A connection that is closed at any moment leaves no socket open."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.proxy import proxy
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
