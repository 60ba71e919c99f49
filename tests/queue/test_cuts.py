"""Every call to the queue, cut before the server saw it, and after it did: nothing is lost, and
nothing ends twice."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleets import Gated, echo_body, hurry, new_token, submission, working
from support.proxy import How, proxy
from support.queue.queues import Queue
from support.waiting import eventually

import leanq.queue.connection
from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.queue.operator_queue import look
from leanq.queue.settings import Settings

PLAIN = [b"a", b"b", b"c"]
CALLS = ["submit", "claim", "renew", "release", "cancel", "reap", "lookup", "notify_worker"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lq-", dir="/tmp") as made:
        yield Path(made)


async def use_everything(
    settings: Settings, near: Settings, timings: WorkerTimings | None = None
) -> None:
    """A life in which every call is made at least once; ``near`` avoids the proxy.

    One request was claimed by a worker that died. One is withdrawn while it runs. One runs when
    its worker is stopped, and ends on the next.
    """
    queue = Queue(near)
    await queue.submit("old", [submission("0-orphan", echo_body(b"orphan"))])
    assert (await queue.claim("dead", ["echo"], 1, busy=0, token=new_token())).jobs
    driver = Gated(*PLAIN, b"orphan", b"withdrawn", b"long")
    for payload in (*PLAIN, b"orphan"):
        driver.gates[payload].set()
    async with AsyncLeanQClient(settings) as lean:
        orphan = asyncio.create_task(lean.attach("0-orphan"))
        async with working(settings, driver, slots=2, timings=timings):
            echoes = asyncio.gather(*(lean.echo(payload) for payload in PLAIN))
            assert await echoes == PLAIN
            withdrawn = asyncio.create_task(lean.echo(b"withdrawn"))
            await eventually(lambda: b"withdrawn" in driver.running)
            long = asyncio.create_task(lean.echo(b"long"))
            await eventually(lambda: b"long" in driver.running)
            withdrawn.cancel()
            await eventually(lambda: b"withdrawn" in driver.stopped)
            assert (await orphan).payload == b"orphan"
        assert driver.stopped.count(b"long") >= 1
        driver.gates[b"long"].set()
        async with working(settings, driver, slots=2, timings=timings):
            assert await long == b"long"
    await queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("call", [*CALLS, "reconcile", "BLPOP", "XREAD"])
async def test_a_call_that_is_cut(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, how: How
) -> None:
    near = replace(settings, lease_s=0.9)
    async with proxy(near, folder) as (settings, through):
        if call == "reconcile":
            # Only after another call was cut.
            through.cut("claim", "after")
        cut = through.cut(call, how)
        await use_everything(settings, near)
        assert cut.happened
    await check(near)


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_worker_that_was_forgotten_joins_again(
    settings: Settings, folder: Path, how: How
) -> None:
    near = replace(settings, lease_s=0.6)
    async with proxy(near, folder) as (settings, through), working(settings) as worker:
        cut = through.cut("register", how)
        queue = Queue(near)
        await queue.release(worker.id, [], leave=True)

        async def is_known() -> bool:
            return any(row.worker == worker.id and row.info for row in (await look(near)).workers)

        await eventually(lambda: cut.happened)
        await eventually(is_known)
        await queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["submit", "claim", "renew", "BLPOP", "XREAD"])
async def test_a_call_that_is_never_answered(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(leanq.queue.connection, "_COMMAND_TIMEOUT_S", 0.5)
    hurry(monkeypatch, block_s=0.5)
    near = replace(settings, lease_s=0.9)
    async with proxy(near, folder) as (settings, through):
        cut = through.cut(call, "stall")
        await use_everything(settings, near, WorkerTimings(block_s=0.5))
        assert cut.happened
    await check(near)


async def check(settings: Settings) -> None:
    """Each of the six ended once, and nothing is left."""
    status = await look(settings)
    assert status.counters["settled"] == 5
    assert status.counters["verdict:cancelled"] == 1
    assert status.dead == 0
    assert not status.workers or all(row.held == 0 for row in status.workers)
    assert not status.priorities
    queue = Queue(settings)
    for row in status.workers:
        await queue.release(row.worker, [], leave=True)
    await queue.close()
