"""Loose pinning with real workers: who serves what, and who steps in for the dead and the busy."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from msgspec import structs
from support.fleets import (
    Recorder,
    ask,
    is_idle,
    worker_processes,
    working,
)
from support.queue.queues import Queue
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings
from leanq.worker import Worker

# What makes the echo driver of a worker process warm for whatever it ran.
WARMING = """
from msgspec import structs
from leanq.lean.driver import EchoDriver
cold = EchoDriver.run
async def run(self, request):
    return structs.replace(await cold(self, request), warm=True)
EchoDriver.run = run
"""


class Warming(Recorder):
    """A driver that is warm for whatever it ran."""

    async def answer(self, request: Request) -> Reply:
        return structs.replace(await super().answer(request), warm=True)


@pytest.fixture
def silent(settings: Settings) -> Settings:
    """Settings by which workers are woken by the queue's word and by nothing else."""
    return replace(settings, lease_s=1e6)


@contextlib.asynccontextmanager
async def several(settings: Settings, count: int, slots: int = 1) -> AsyncIterator[list[Worker]]:
    """Idle workers of drivers that get warm."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                working(settings, Warming(), slots=slots, timings=WorkerTimings(block_s=1e6))
            )
            for _ in range(count)
        ]
        await eventually(lambda: all(is_idle(worker) for worker in workers))
        yield workers


async def pinned(
    lean: AsyncLeanQClient, payload: bytes, *affinity: str, delay_s: float = 0.0
) -> Reply:
    """The reply to an echo that names affinities."""
    return await ask(lean, payload, delay_s, affinity=affinity)


async def test_a_warm_worker_that_is_busy_delays_nothing(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    async with several(silent, 2) as workers:
        drivers = {w.id: d for w in workers if isinstance(d := w.drivers["echo"], Warming)}
        held = asyncio.create_task(pinned(lean, b"held", "state"))
        await eventually(lambda: any(driver.running for driver in drivers.values()))
        (home,) = (name for name, driver in drivers.items() if driver.running)
        drivers[home].let_go()
        assert (await held).worker == home
        other = (drivers.keys() - {home}).pop()
        held = asyncio.create_task(pinned(lean, b"held", "state"))
        await eventually(lambda: any(driver.running for driver in drivers.values()))
        busy = home if drivers[home].running else other
        assert (await pinned(lean, b"next", "state")).worker != busy
        drivers[busy].let_go()
        assert (await held).worker == busy


@pytest.mark.slow
async def test_all_is_answered_while_warm_workers_are_killed(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    short, rng = replace(settings, lease_s=1.0, max_attempts=10), random.Random(1)
    with contextlib.ExitStack() as stack:
        fleet = [*stack.enter_context(worker_processes(short, 3, slots=2, prelude=WARMING))]
        asked: list[asyncio.Task[Reply]] = []
        for number in range(600):
            names = (f"s{rng.randrange(20)}", f"h{rng.randrange(3)}")[: rng.randrange(3)]
            work = pinned(lean, b"%d" % number, *names, delay_s=rng.random() * 0.01)
            asked.append(asyncio.create_task(work))
            # Now and then they catch up, so that some are waited for and some wait.
            if rng.random() < 0.1:
                await asyncio.gather(*rng.sample(asked, min(10, len(asked))))
            if number in (200, 400):
                fleet.pop(0).send(signal.SIGKILL)
                fleet += stack.enter_context(worker_processes(short, slots=2, prelude=WARMING))
        replies = await asyncio.gather(*asked)
        assert [reply.payload for reply in replies] == [b"%d" % n for n in range(600)]
        status = await queue.status()
        assert status.counters["settled"] == 600
        assert status.counters["warm_hits"] > 100
        for worker in fleet:
            worker.send(signal.SIGTERM)
        async with working(short):
            await eventually(lambda: all(worker.process.poll() is not None for worker in fleet))

            async def alone() -> bool:
                return len((await queue.status()).workers) == 1

            await eventually(alone)
