"""Identical checks from real clients, on workers whose Lean is a stand-in that tells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from support.fleets import Recorder, counter, counts, short_lease, working
from support.queue.queues import Queue
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.errors import RequestError, WorkerError
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.keys import new_request_id, shard_of
from leanq.queue.requests import Reply, Request, Verdict
from leanq.queue.results import Submission
from leanq.queue.settings import Settings


class StandIn(Recorder):
    """Accepts every check, once :meth:`let_go` was called where its code begins with ``held``."""

    def __init__(self, fingerprint: str = "print", verdict: Verdict = "accepted") -> None:
        super().__init__("default")
        self.fingerprint, self.verdict = fingerprint, verdict
        self.error: str | None = None

    @property
    def about(self) -> Mapping[str, object]:
        return {"driver": "stand-in", "fingerprint": self.fingerprint}

    async def run(self, request: Request) -> Reply:
        return await super().run(structs.replace(request, payload=request.code.encode()))

    async def answer(self, request: Request) -> Reply:
        if request.payload.startswith(b"held"):
            await self.gate.wait()
        if self.error:
            return Reply(error=self.error)
        return Reply(self.verdict, fingerprint=self.fingerprint)


@contextlib.asynccontextmanager
async def two(settings: Settings) -> AsyncIterator[tuple[AsyncLeanQClient, AsyncLeanQClient]]:
    async with (
        AsyncLeanQClient(settings, tenant="one") as one,
        AsyncLeanQClient(settings, tenant="two") as other,
    ):
        yield one, other


def attached(queue: Queue, count: int) -> Callable[[], Awaitable[bool]]:
    """Whether so many requests are in flight without waiting or running."""

    async def are() -> bool:
        status = await queue.status()
        waiting = status.counters.get("waiting:default", 0)
        running = sum(row.held for row in status.workers)
        ended = sum(n for name, n in status.counters.items() if name.startswith("verdict:"))
        return status.counters.get("submitted", 0) - waiting - running - ended == count

    return are


async def verdicts(*checks: Awaitable[Reply]) -> list[str | None]:
    return [reply.verdict for reply in await asyncio.gather(*checks)]


@pytest.mark.slow
async def test_two_clients_at_once_run_it_once(settings: Settings, queue: Queue) -> None:
    driver = StandIn()
    async with working(settings, driver, slots=4), two(settings) as (one, other):
        for number in range(20):
            driver.gate.clear()
            code = f"held {number}"
            tasks = [asyncio.create_task(client.check(code)) for client in (one, other)]
            await eventually(attached(queue, 1))
            driver.let_go()
            replies = await asyncio.gather(*tasks)
            assert replies[0] == replies[1] == Reply("accepted", fingerprint="print")
            assert len({reply.request_id for reply in replies}) == 2
        assert len(driver.started) == 20
    assert await counter(queue, "coalesced") == 20


@pytest.mark.slow
async def test_a_flood_of_few_kinds_ends_for_all(settings: Settings, queue: Queue) -> None:
    driver = StandIn()
    async with working(settings, driver, slots=3), two(settings) as clients:
        codes = [f"code {number % 7}" for number in range(700)]
        checks = [client.check(code) for code in codes for client in clients]
        assert set(await verdicts(*checks)) == {"accepted"}
    assert len(driver.started) + await counter(queue, "coalesced") == 1400
    assert len(driver.started) < 1400


async def test_what_differs_in_anything_is_run_for_itself(settings: Settings, queue: Queue) -> None:
    driver = StandIn()
    async with working(settings, driver, slots=8), two(settings) as (one, other):
        tasks = [
            asyncio.create_task(check)
            for check in (
                one.check("held", priority=0, deadline_s=100),
                other.check("held", audit=False),
                other.check("held", timeout_s=59),
                other.check("held", memory_mb=100),
                other.check("held", allow_axioms=["a"]),
                other.check("held "),
            )
        ]
        await eventually(lambda: len(driver.running) == 6)
        # Who asks, and how urgently, is no matter.
        tasks.append(asyncio.create_task(other.check("held", priority=2, allow_axioms=[])))
        await eventually(attached(queue, 1))
        driver.let_go()
        assert await verdicts(*tasks) == ["accepted"] * 7


@pytest.mark.parametrize("leaves", [0, 1])
async def test_one_of_two_clients_withdraws(settings: Settings, queue: Queue, leaves: int) -> None:
    driver = StandIn()
    async with working(settings, driver), two(settings) as clients:
        tasks = []
        for number, client in enumerate(clients):
            tasks.append(asyncio.create_task(client.check("held")))
            await eventually(attached(queue, number))
            await eventually(lambda: driver.running == [b"held"])
        tasks[leaves].cancel()
        await eventually(counts(queue, "verdict:cancelled", 1))
        driver.let_go()
        assert (await tasks[1 - leaves]).verdict == "accepted"
    assert (driver.started, driver.stopped) == ([b"held"], [])


async def test_when_both_have_withdrawn_the_run_is_stopped(
    settings: Settings, queue: Queue
) -> None:
    driver = StandIn()
    async with working(settings, driver), two(settings) as clients:
        tasks = [asyncio.create_task(client.check("held")) for client in clients]
        await eventually(attached(queue, 1))
        for task in tasks:
            task.cancel()
        await eventually(lambda: driver.stopped == [b"held"])
    assert await counter(queue, "verdict:cancelled") == 2


async def test_a_waiters_deadline_passes_alone(settings: Settings, queue: Queue) -> None:
    driver = StandIn()
    async with working(settings, driver), two(settings) as (one, other):
        task = asyncio.create_task(one.check("held"))
        await eventually(lambda: driver.running == [b"held"])
        assert (await other.check("held", deadline_s=0.2)).verdict == "expired"
        assert driver.running == [b"held"]
        driver.let_go()
        assert (await task).verdict == "accepted"


async def test_both_are_run_elsewhere_when_the_worker_dies(
    settings: Settings, queue: Queue
) -> None:
    short = short_lease(settings)
    dying = Queue(short)
    async with two(short) as clients:
        tasks = [asyncio.create_task(client.check("held")) for client in clients]
        await eventually(counts(queue, "submitted", 2))
        await dying.register("dying", b"", {"default": b""})
        (job,) = (await dying.claim("dying", ["default"], 5, busy=0, token="n:")).jobs
        await eventually(attached(queue, 1))
        driver = StandIn()
        async with working(short, driver):
            await eventually(lambda: driver.running == [b"held"], 30)
            await eventually(attached(queue, 1))
            driver.let_go()
            replies = await asyncio.gather(*tasks)
    assert [(reply.verdict, reply.attempts) for reply in replies] == [("accepted", 2)] * 2
    assert job.request_id in {reply.request_id for reply in replies}
    await dying.close()


async def test_both_are_run_elsewhere_when_the_worker_is_told_to_end(
    settings: Settings, queue: Queue
) -> None:
    first, second = StandIn(), StandIn()
    async with two(settings) as clients:
        async with working(settings, first):
            tasks = [asyncio.create_task(client.check("held")) for client in clients]
            await eventually(attached(queue, 1))
        async with working(settings, second):
            await eventually(attached(queue, 1))
            second.let_go()
            replies = await asyncio.gather(*tasks)
    assert [(reply.verdict, reply.attempts) for reply in replies] == [("accepted", 1)] * 2
    assert (len(first.started), len(second.started)) == (1, 1)


async def test_a_killer_takes_no_more_workers_for_being_asked_for_twice(
    settings: Settings, queue: Queue
) -> None:
    class Killed(StandIn):
        async def answer(self, request: Request) -> Reply:
            await eventually(attached(queue, 1))
            raise WorkerError("the machine is out of memory")

    driver = Killed()
    async with two(settings) as clients:
        tasks = [asyncio.create_task(client.check("killer")) for client in clients]
        with pytest.raises(WorkerError):
            async with working(settings, driver, timings=WorkerTimings(pause_after_failure_s=0.0)):
                assert await verdicts(*tasks) == ["poisoned"] * 2
        assert len(driver.started) == settings.max_attempts


async def test_an_echo_is_run_each_time(settings: Settings) -> None:
    driver = Recorder()
    async with working(settings, driver), two(settings) as clients:
        tasks = [asyncio.create_task(client.echo(b"held")) for client in clients]
        await eventually(lambda: len(driver.running) == 2)
        driver.let_go()
        await asyncio.gather(*tasks)


async def test_an_error_is_for_all_that_joined_and_is_not_remembered(
    settings: Settings, queue: Queue
) -> None:
    settings = replace(settings, remember_s=60.0)
    driver = StandIn()
    driver.error = "it makes no sense here"
    async with working(settings, driver), two(settings) as (one, other):
        tasks = [asyncio.create_task(client.check("held")) for client in (one, other)]
        await eventually(attached(queue, 1))
        driver.let_go()
        for task in tasks:
            with pytest.raises(RequestError, match="no sense"):
                await task
        driver.error = None
        assert await verdicts(one.check("held"), other.check("a")) == ["accepted", "accepted"]


@pytest.mark.parametrize(
    ("verdict", "runs"),
    [("accepted", 1), ("rejected", 1), ("exhausted", 1), ("timeout", 2), ("crashed", 2)],
)
async def test_only_what_lean_says_is_remembered(
    settings: Settings, queue: Queue, verdict: Verdict, runs: int
) -> None:
    settings = replace(settings, remember_s=60.0)
    driver = StandIn(verdict=verdict)
    async with working(settings, driver), two(settings) as (one, other):
        first = await one.check("code")
        second = await other.check("code")
        assert (first, first.worker) == (second, second.worker)
        assert first.request_id != second.request_id
        assert await other.attach(second.request_id) == second
    assert len(driver.started) == runs
    assert await counter(queue, "remembered") == 2 - runs


async def test_nothing_is_remembered_unless_asked_for(settings: Settings) -> None:
    driver = StandIn()
    async with working(settings, driver), two(settings) as (one, other):
        assert await one.check("code") == await other.check("code")
    assert len(driver.started) == 2


async def test_a_changed_environment_is_asked_anew(settings: Settings, queue: Queue) -> None:
    settings = replace(short_lease(settings, 1.0), remember_s=60.0)
    driver = StandIn("old")
    async with working(settings, driver), two(settings) as (one, other):
        assert (await one.check("code")).fingerprint == "old"
        assert (await other.check("code")).fingerprint == "old"
        assert len(driver.started) == 1
        driver.fingerprint = "new"
        prints = f"{queue.keys.tag}:fingerprints"

        async def told() -> bool:
            found: Any = await queue.call(lambda c: c.hgetall(prints))
            return bool(found == {b"default": b"new"})

        await eventually(told)
        assert (await other.check("code")).fingerprint == "new"
        assert len(driver.started) == 2


def test_identical_requests_meet_in_one_shard(settings: Settings) -> None:
    def shards(*submissions: Submission) -> set[int]:
        return {shard_of(item.request_id) for item in submissions}

    calls = RequestBuilder(replace(settings, shards=8), "tenant")
    same = [calls.check("same", {}).submission for _ in range(50)]
    assert len(shards(*same)) == 1
    assert {len(item.digest) for item in same} == {22}
    assert len(shards(*(calls.check(f"{number}", {}).submission for number in range(500)))) == 8
    assert len(shards(*(calls.echo(b"same", 0.0, {}).submission for _ in range(500)))) == 8
    assert {shard_of(new_request_id(8)) for _ in range(500)} == set(range(8))
