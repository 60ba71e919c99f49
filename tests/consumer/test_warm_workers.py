"""Loose pinning with real workers: who serves what, and who steps in for the dead and the busy."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis
from msgspec import structs
from support.fleets import (
    Recorder,
    ask,
    counter,
    counts,
    is_idle,
    new_token,
    worker_processes,
    working,
)
from support.shards import set_clock, with_test_clock
from support.waiting import eventually

import leanq.queue.queue
from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import Timings
from leanq.queue.keys import Keys
from leanq.queue.queue import Queue
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Settlement
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply
from leanq.worker import Worker

# What makes the echo driver of a worker process warm for whatever it ran.
WARMING = """
from msgspec import structs
from leanq.lean.echo import EchoDriver
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


@pytest.fixture
def still(silent: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """The same where the server's time stands still, so that no reservation expires."""
    monkeypatch.setattr(leanq.queue.queue, "script_text", with_test_clock)
    tag = Keys(silent.prefix, 0, 1).tag
    with redis.Redis.from_url(silent.url) as server:
        set_clock(server, tag, 1_000_000)
        yield silent
        server.delete(*(f"{tag}:{name}" for name in ("clock", "watchdog", "watchdog_ends")))


@contextlib.asynccontextmanager
async def several(settings: Settings, count: int, slots: int = 1) -> AsyncIterator[list[Worker]]:
    """Idle workers of drivers that get warm."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                working(settings, Warming(), slots=slots, timings=Timings(block_s=1e6))
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


async def dead_but_warm(queue: Queue, *affinity: str, available: int = 1) -> None:
    """Makes the fleet believe in an idle worker that is warm, and never comes."""
    claimed = await queue.claim("dead", ["echo"], 1, busy=0, token=new_token())
    (job,) = claimed.jobs
    reply = pack_reply(job.token, Reply(payload=b""))
    done = Settlement(job.request_id, job.token, "echo", reply, warm=True)
    token = new_token()
    await queue.claim("dead", ["echo"], available, busy=0, token=token, settlements=[done])


async def test_what_is_pinned_goes_where_it_is_warm(
    still: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    async with several(still, 4):
        homes = {}
        for state in ("s0", "s1", "s2"):
            homes[state] = (await pinned(lean, b"first", state)).worker
        for _ in range(10):
            for state, home in homes.items():
                assert (await pinned(lean, b"next", state)).worker == home
    assert await counter(queue, "warm_hits") == 30
    assert await counter(queue, "warm_misses") == 3
    assert await counter(queue, "reassignments") == 0


async def test_a_warm_worker_that_is_busy_delays_nothing(
    still: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    async with several(still, 2) as workers:
        home = (await pinned(lean, b"first", "state")).worker
        held = asyncio.create_task(pinned(lean, b"held", "state"))
        (busy,) = (worker for worker in workers if worker.id == home)
        driver = busy.drivers["echo"]
        assert isinstance(driver, Warming)
        await eventually(lambda: driver.running == [b"held"])
        assert (await pinned(lean, b"next", "state")).worker != home
        driver.let_go()
        assert (await held).worker == home
    assert await counter(queue, "reassignments") == 0


async def test_a_worker_that_takes_nothing_more_gives_reservations_up(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    async with several(silent, 1, slots=2) as (draining,):
        await pinned(lean, b"first", "state")
        held = asyncio.create_task(pinned(lean, b"held", "state"))
        driver = draining.drivers["echo"]
        assert isinstance(driver, Warming)
        await eventually(lambda: driver.running == [b"held"])
        async with several(silent, 1) as (other,):
            draining.stop(grace_s=60)
            assert (await pinned(lean, b"next", "state")).worker == other.id
            driver.let_go()
            assert (await held).worker == draining.id
    assert await counter(queue, "reassignments") == 0


@pytest.mark.slow
async def test_what_the_killed_was_reserved_is_stolen(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    with worker_processes(silent, slots=1, prelude=WARMING) as (victim,):
        home = (await pinned(lean, b"first", "state")).worker
        assert f"-{victim.process.pid}-" in home
        assert (await pinned(lean, b"next", "state")).worker == home
        async with several(silent, 1) as (other,):
            victim.send(signal.SIGKILL)
            victim.process.wait()
            for _ in range(3):
                assert (await pinned(lean, b"stolen", "state")).worker == other.id
    assert await counter(queue, "reassignments") == 1
    await queue.release(home, [], leave=True)


async def test_a_watchdog_that_got_busy_has_another_look(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    first = asyncio.create_task(pinned(lean, b"first", "state"))
    await eventually(counts(queue, "submitted", 1))
    await dead_but_warm(queue, "state", available=5)
    await first
    async with several(silent, 2) as workers:
        drivers = [worker.drivers["echo"] for worker in workers]
        for number in range(1, 4):
            reserved = asyncio.create_task(pinned(lean, b"reserved", "state"))
            held = asyncio.create_task(lean.echo(b"held"))
            assert (await reserved).payload == b"reserved"
            for driver in drivers:
                assert isinstance(driver, Warming)
                driver.let_go()
            await held
            await eventually(counts(queue, "settled", 1 + 2 * number))
    assert await counter(queue, "reassignments") == 1
    await queue.release("dead", [], leave=True)


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
            # Now and then they catch up, so that some are reserved and some are drawn.
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
