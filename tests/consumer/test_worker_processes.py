"""Workers as processes: signals, sudden death, and a machine that sleeps too long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from support.fleets import (
    HOUR_S,
    Recorder,
    WorkerProcess,
    ask,
    counter,
    echo_body,
    submission,
    worker_processes,
    working,
)
from support.queue.queues import Queue
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.queue.settings import Settings


def holds(queue: Queue, worker: WorkerProcess, count: int) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        row = worker.row(await queue.status())
        return row is not None and row.held == count

    return reached


async def ended(worker: WorkerProcess, deadline_s: float) -> int:
    """The exit code, which has to come within the deadline."""
    return await asyncio.to_thread(worker.process.wait, deadline_s)


@pytest.mark.slow
async def test_sigterm_lets_short_requests_end_and_gives_long_ones_to_others(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    with worker_processes(settings, grace_s=5) as (first,):
        await eventually(holds(queue, first, 0))
        short = [asyncio.create_task(ask(lean, b"short", delay_s=0.5)) for _ in range(2)]
        request_ids = ["0-long", "0-longer"]
        await queue.submit(
            "me", [submission(request_id, echo_body(b"", HOUR_S)) for request_id in request_ids]
        )
        await eventually(holds(queue, first, 4))
        first.send(signal.SIGTERM)
        with worker_processes(settings) as (second,):
            assert await ended(first, 5) == 0
            replies = await asyncio.gather(*short)
            assert {reply.attempts for reply in replies} == {1}
            assert len({reply.worker for reply in replies}) == 1
            await eventually(holds(queue, second, 2))
            await queue.cancel(request_ids)
            await eventually(holds(queue, second, 0))
            # Giving back costs no attempt: both were in their first when they were withdrawn.
            ends = [await lean.attach(request_id) for request_id in request_ids]
            assert [(end.verdict, end.attempts) for end in ends] == 2 * [("cancelled", 1)]
            second.send(signal.SIGTERM)
            assert await ended(second, 20) == 0
    assert await counter(queue, "released") == 2
    assert not (await queue.status()).workers


async def test_a_second_signal_does_not_wait(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    with worker_processes(settings, grace_s=HOUR_S) as (worker,):
        task = asyncio.create_task(ask(lean, b"held", delay_s=HOUR_S))
        await eventually(holds(queue, worker, 1))
        worker.send(signal.SIGTERM)
        worker.send(signal.SIGINT)
        assert await ended(worker, 20) == 0
    assert await counter(queue, "released") == 1
    driver = Recorder()
    async with working(settings, driver):
        await eventually(lambda: driver.running == [b"held"])
        driver.let_go()
        assert (await task).attempts == 1


@pytest.mark.slow
async def test_the_work_of_the_dead_and_of_the_asleep_is_done_by_others(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    short = replace(settings, lease_s=2)
    with worker_processes(short, 2, slots=1) as (dead, asleep):
        for worker in (dead, asleep):
            await eventually(holds(queue, worker, 0))
        asked = [asyncio.create_task(ask(lean, b"%d" % n, delay_s=1)) for n in range(2)]
        for worker in (dead, asleep):
            await eventually(holds(queue, worker, 1))
        dead.send(signal.SIGKILL)
        asleep.send(signal.SIGSTOP)
        with worker_processes(short) as (other,):
            replies = await asyncio.gather(*asked)
            row = other.row(await queue.status())
            assert row
            assert [(r.payload, r.attempts, r.worker) for r in replies] == [
                (b"%d" % n, 2, row.worker) for n in range(2)
            ]
            other.send(signal.SIGTERM)
            assert await ended(other, 20) == 0
        # What it did in its sleep's other half counts for nothing, and it is fit for work.
        asleep.send(signal.SIGCONT)
        assert (await ask(lean, b"awake")).attempts == 1
        await eventually(holds(queue, asleep, 0))
        assert await counter(queue, "settled") == 3
        assert await counter(queue, "reaped") == 2
        asleep.send(signal.SIGTERM)
        assert await ended(asleep, 20) == 0
    assert not (await queue.status()).workers
