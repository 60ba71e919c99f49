"""Short requests are claimed ahead of free slots, and none waits while other workers idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.fleets import Recorder, working
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.queue.operator_queue import look
from leanq.queue.settings import Settings
from leanq.worker import Worker

# A busy machine may look late at what waits.
PATIENT = WorkerTimings(claimed_ahead_wait_s=2.0)


@pytest.fixture
async def lean(settings: Settings) -> AsyncIterator[AsyncLeanQClient]:
    async with AsyncLeanQClient(settings) as client:
        yield client


async def used_to_short_ones(lean: AsyncLeanQClient, worker: Worker) -> None:
    """Has the worker run some that take a millisecond, on however busy a machine."""
    await asyncio.gather(*(lean.echo(b"%d" % number, 0.001) for number in range(30)))
    worker.slot_pool.run_time.value_s = 0.001


async def behind_a_long_one(
    lean: AsyncLeanQClient, worker: Worker, *payloads: bytes
) -> list[asyncio.Task[bytes]]:
    """Has the worker, of one slot, run what does not end, and claim others ahead."""
    await used_to_short_ones(lean, worker)
    tasks = [asyncio.create_task(lean.echo(payload)) for payload in (b"held", *payloads)]
    await eventually(lambda: worker.slot_pool.slots.waiting > 0)
    return tasks


async def test_short_requests_are_claimed_ahead_and_run_one_by_one(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    driver = Recorder()
    async with working(settings, driver, slots=2) as worker:
        most = 0
        echoes = [asyncio.create_task(lean.echo(b"%d" % n, 0.001)) for n in range(200)]
        while not all(task.done() for task in echoes):
            most = max(most, worker.slot_pool.slots.waiting)
            assert worker.slot_pool.slots.waiting <= 64
            await asyncio.sleep(0)
        assert await asyncio.gather(*echoes) == [b"%d" % n for n in range(200)]
        assert driver.most == 2
        assert most > 0
        assert (worker.slot_pool.slots.taken, worker.slot_pool.slots.waiting) == (0, 0)


@pytest.mark.slow
async def test_what_waits_behind_a_long_one_goes_to_another_worker(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    first, second = Recorder(), Recorder()
    async with working(settings, first, slots=1, timings=PATIENT) as worker:
        held, *others = await behind_a_long_one(lean, worker, b"a", b"b", b"c")
        async with working(settings, second, slots=1):
            assert await asyncio.gather(*others) == [b"a", b"b", b"c"]
        assert sorted(second.started) == [b"a", b"b", b"c"]
        # Nor does it claim ahead again.
        more = asyncio.create_task(lean.echo(b"more"))
        async with working(settings, second, slots=1):
            assert await more == b"more"
        assert worker.slot_pool.slots.waiting == 0
        first.let_go()
        assert await held == b"held"
    assert first.stopped == []


async def test_what_waits_goes_back_at_once_when_the_worker_is_stopped(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    driver = Recorder()
    async with working(settings, driver, slots=1, timings=PATIENT) as worker:
        held, other = await behind_a_long_one(lean, worker, b"other")
        worker.stop(grace_s=60.0)
        async with working(settings, slots=1):
            assert await other == b"other"
        driver.let_go()
        assert await held == b"held"


async def test_what_is_withdrawn_while_it_waits_never_runs(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    driver = Recorder()
    async with working(settings, driver, slots=1, timings=PATIENT) as worker:
        held, other = await behind_a_long_one(lean, worker, b"other")
        other.cancel()
        await eventually(lambda: worker.slot_pool.slots.waiting == 0)
        driver.let_go()
        assert await held == b"held"
        await lean.echo(b"last")
        assert b"other" not in driver.started


async def test_long_requests_are_not_claimed_ahead(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    driver = Recorder()
    async with working(settings, driver, slots=2):
        await asyncio.gather(*(lean.echo(b"%d" % number, 0.06) for number in range(8)))
        tasks = [asyncio.create_task(lean.echo(b"held %d" % n)) for n in range(8)]

        async def held() -> int:
            return sum(row.held for row in (await look(settings)).workers)

        async def both_run() -> bool:
            return await held() >= 2

        await eventually(both_run)
        await look(settings)
        assert await held() == 2
        driver.let_go()
        await asyncio.gather(*tasks)
