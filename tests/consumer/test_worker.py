"""The worker's loop against a real server: what it takes, how it waits, bugs of its drivers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.fleets import (
    Failing,
    Recorder,
    Wire,
    ask,
    counts,
    echo_body,
    is_idle,
    new_token,
    short_lease,
    submission,
    working,
)
from support.queue.queues import Queue
from support.servers import Server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.errors import RequestError, SandboxError, ToolchainError, UnavailableError, WorkerError
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Became, Status, Wakeup
from leanq.queue.settings import Settings
from leanq.queue.worker_queue import WorkerQueue
from leanq.states import States
from leanq.worker import Worker

# So long that within a test nothing is found by a renewal's second look.
LONG_LEASE_S = 1e6
# One blocking call lasts the whole test.
SILENT = WorkerTimings(block_s=1e6)
QUICK = WorkerTimings(pause_after_failure_s=0.01)


@pytest.fixture
def silent(settings: Settings) -> Settings:
    """Settings by which a worker that waits is woken by the wake-up and by nothing else."""
    return replace(settings, lease_s=LONG_LEASE_S)


# What it takes and what it tells


async def test_slots_are_respected_and_used(settings: Settings, lean: AsyncLeanQClient) -> None:
    driver = Recorder()
    async with working(settings, driver, slots=3):
        tasks = [asyncio.create_task(ask(lean, b"held %d" % n)) for n in range(12)]
        await eventually(lambda: len(driver.running) == 3)
        driver.let_go()
        replies = await asyncio.gather(*tasks)
    assert driver.most == 3
    assert len(driver.started) == 12
    assert {reply.attempts for reply in replies} == {1}
    assert len({reply.worker for reply in replies}) == 1


@pytest.mark.slow
async def test_thousands_of_slots_are_filled(settings: Settings, queue: Queue) -> None:
    driver = Recorder()
    batch = [submission(f"0-{n}", echo_body(b"held %d" % n)) for n in range(4096)]
    for start in range(0, len(batch), 1000):
        await queue.submit("client", batch[start : start + 1000])
    async with working(settings, driver, slots=4096):
        await eventually(lambda: len(driver.running) == 4096)
        driver.let_go()
        await eventually(counts(queue, "settled", 4096))


async def test_what_waits_for_a_worker_is_answered_when_one_starts(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    task = asyncio.create_task(ask(lean, b"early"))
    await eventually(counts(queue, "submitted", 1))
    async with working(settings):
        reply = await task
    assert (reply.payload, reply.attempts) == (b"early", 1)
    assert reply.queued_s >= 0


async def test_a_worker_serves_several_environments(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    one, two = Recorder("one"), Recorder("two")
    async with working(settings, one, two, slots=2):
        environments = 10 * ["one", "two"]
        asked = (
            ask(lean, b"%d" % n, environment=environment)
            for n, environment in enumerate(environments)
        )
        await asyncio.gather(*asked)
    assert sorted(one.started) == sorted(b"%d" % n for n in range(0, 20, 2))
    assert sorted(two.started) == sorted(b"%d" % n for n in range(1, 20, 2))


async def test_each_request_comes_with_its_tenant(settings: Settings) -> None:
    class Tenants(Recorder):
        tenants: list[str]

        async def run(self, request: Request) -> Reply:
            self.tenants.append(request.tenant)
            return await super().run(request)

    driver = Tenants()
    driver.tenants = []
    async with (
        working(settings, driver, slots=1),
        AsyncLeanQClient(settings, tenant="alice") as alice,
        AsyncLeanQClient(settings) as nobody,
    ):
        # The first of each comes by a claim, and the next ones with the settlement before them.
        await asyncio.gather(*(alice.echo(b"%d" % n) for n in range(20)))
        await asyncio.gather(*(nobody.echo(b"%d" % n) for n in range(20)))
    assert driver.tenants == ["alice"] * 20 + ["default"] * 20


async def test_a_quarantined_runs_alone(settings: Settings, queue: Queue, silent: Settings) -> None:
    driver = Recorder()
    await queue.submit("client", [submission("0-quarantined", echo_body(b"held quarantined"))])
    for _ in range(settings.max_attempts - 1):
        (job,) = (await queue.claim("dead", ["echo"], 1, busy=0, token=new_token())).jobs
        await queue.release("dead", [(job.request_id, job.token)], how="retry", leave=True)
    async with working(silent, driver, slots=4, timings=SILENT) as worker:
        await eventually(lambda: driver.running == [b"held quarantined"])
        # Its other slots must not even listen for work.
        await eventually(lambda: not worker.consumers[0].state.listening)
        others = [submission(f"0-{n}", echo_body(b"other")) for n in range(3)]
        assert await queue.submit("client", others) == 3 * [Became.QUEUED]
        await eventually(counts(queue, "waiting:echo", 3))
        assert driver.running == [b"held quarantined"]
        driver.let_go()
        await eventually(counts(queue, "settled", 4))
    assert driver.started[0] == b"held quarantined"


# Wake-ups


async def test_an_idle_worker_hears_the_wakeup(silent: Settings, lean: AsyncLeanQClient) -> None:
    wire = Wire(silent)
    async with working(silent, wire=wire, slots=1, timings=SILENT) as worker:
        for n in range(3):
            await eventually(lambda: is_idle(worker))
            assert await lean.echo(b"%d" % n) == b"%d" % n
        # No heartbeat came to its help.
        assert wire.calls["renew"] == 0


async def test_a_wakeup_that_rings_during_a_claim_is_heard(
    silent: Settings, lean: AsyncLeanQClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, heard = Wire(silent), list[object]()
    wait_wakeup = WorkerQueue.wait_wakeup

    async def listen(
        queue: WorkerQueue, worker: str, environments: list[str], block_s: float
    ) -> object:
        heard.append(await wait_wakeup(queue, worker, environments, block_s))
        return heard[-1]

    monkeypatch.setattr(WorkerQueue, "wait_wakeup", listen)
    let_go = wire.hold_up("claim", after=True)
    async with working(silent, wire=wire, slots=1, timings=SILENT):
        # The server has answered that there is nothing, and the answer is still on its way.
        await eventually(lambda: wire.waiting == ["claim"])
        echo = asyncio.create_task(lean.echo(b"x"))
        await eventually(lambda: [type(each) for each in heard] == [Wakeup])
        let_go()
        assert await echo == b"x"


async def test_a_worker_that_was_busy_hears_the_wakeup_again(
    silent: Settings, lean: AsyncLeanQClient
) -> None:
    driver = Recorder()
    async with working(silent, driver, slots=1, timings=SILENT) as worker:
        first = asyncio.create_task(lean.echo(b"held"))
        await eventually(lambda: not worker.consumers[0].state.listening)
        driver.let_go()
        await first
        await eventually(lambda: is_idle(worker))
        assert await lean.echo(b"next") == b"next"


async def test_a_worker_looks_again_after_a_pause(silent: Settings, lean: AsyncLeanQClient) -> None:
    timings = replace(SILENT, pause_after_failure_s=0.2)
    driver = Failing(WorkerError("no room"), 0)
    async with working(silent, driver, slots=2, timings=timings):
        held = asyncio.create_task(lean.echo(b"held"))
        await eventually(lambda: driver.running == [b"held"])
        driver.failures = 1
        # Too large to come along with its wake-up: it is claimed before it runs.
        failed = asyncio.create_task(ask(lean, b"fails first" + bytes(20_000)))
        await eventually(lambda: driver.failures == 0)
        # It settles this one while it takes nothing new.
        driver.let_go()
        assert await held == b"held"
        assert (await failed).attempts == 2


async def test_an_idle_worker_asks_little(settings: Settings) -> None:
    wire = Wire(short_lease(settings))
    async with working(short_lease(settings), wire=wire):
        await eventually(lambda: wire.calls["renew"] >= 6)
        # A sign of life and a look at the queue, three times per lease; the blocking wait apart.
        # And a look at the states, which it shares with all others, once a lease.
        assert wire.calls.pop("state_collect") <= 3
        assert sum(wire.calls.values()) <= 2 * wire.calls["renew"] + 4


# Faults


async def test_a_machines_failure_gives_back_and_counts_the_attempt(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    driver = Failing(SandboxError("no room"), 2)
    async with working(settings, driver, slots=1, timings=QUICK):
        # Too large to come along with its wake-up: it is claimed before it runs.
        reply = await ask(lean, bytes(20_000))
    assert (reply.payload, reply.attempts) == (bytes(20_000), 3)


async def test_a_worker_that_fails_again_and_again_ends(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    patient = replace(settings, max_attempts=10)
    task = asyncio.create_task(ask(lean, b"x"))
    driver = Failing(SandboxError("no room"), 9)
    with pytest.raises(SandboxError, match="no room"):
        async with working(patient, driver, slots=1, timings=QUICK) as worker:
            await eventually(lambda: worker.slot_pool.breaker.fault is not None)
    async with working(patient):
        # Each failure counts, the last one too.
        assert (await task).attempts == Settings.max_attempts + 1


@pytest.mark.parametrize("error", [RuntimeError("a fault\nof two lines"), KeyError("x")])
async def test_a_drivers_bug_ends_the_request_and_not_the_worker(
    settings: Settings, lean: AsyncLeanQClient, error: Exception
) -> None:
    async with working(settings, Failing(error, 1), slots=1):
        with pytest.raises(RequestError, match=type(error).__name__) as failed:
            await lean.echo(b"x")
        assert "\n" not in str(failed.value)
        assert await lean.echo(b"next") == b"next"


async def test_a_driver_that_answers_nonsense_is_a_bug_too(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    class Nonsense(Recorder):
        async def answer(self, request: Request) -> Reply:
            nothing: Any = None
            return nothing if request.payload == b"x" else await super().answer(request)

    async with working(settings, Nonsense(), slots=1):
        with pytest.raises(RequestError, match="failed"):
            await lean.echo(b"x")
        assert await lean.echo(b"next") == b"next"


@pytest.mark.parametrize("body", [b"\xc1", b"", b"\x80", b"\x82\xa1v\x00\xa2op\xa4echo"])
async def test_bytes_that_are_no_request_end_with_an_error(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, body: bytes
) -> None:
    await queue.submit("client", [submission("0-bad", body)])
    async with working(settings):
        with pytest.raises(RequestError, match="cannot be read"):
            await lean.attach("0-bad")
        assert await lean.echo(b"next") == b"next"


@pytest.mark.parametrize("body", [b"\x82\xa1v\x02\xa2op\xa4echo", b"\x82\xa1v\x01\xa2op\xa4fold"])
async def test_what_a_newer_release_asks_is_left_to_newer_workers(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, body: bytes
) -> None:
    await queue.submit("client", [submission("0-newer", body)])
    async with working(settings):
        await eventually(counts(queue, "released", 1))
        assert await lean.echo(b"next") == b"next"
        await eventually(counts(queue, "released", 2))
    (job,) = (await queue.claim("newer", ["echo"], 9, busy=0, token=new_token())).jobs
    assert (job.request_id, job.attempts, job.body) == ("0-newer", 1, body)
    assert await queue.cancel(["0-newer"]) == [True]
    await queue.release("newer", [], leave=True)


async def test_a_driver_that_cannot_open_ends_the_worker(settings: Settings, queue: Queue) -> None:
    class Broken(Recorder):
        async def open(self, _states: States) -> None:
            raise ToolchainError("no Lean at all")

    class Closing(Recorder):
        closed = False

        async def close(self) -> None:
            self.closed = True

    good = Closing("good")
    worker = Worker(settings, [good, Broken()], slots=1)
    with pytest.raises(ToolchainError, match="no Lean at all"):
        await worker.run()
    assert good.closed
    assert not (await queue.status()).workers


async def test_a_worker_stopped_before_it_ran_leaves_at_once(
    settings: Settings, queue: Queue
) -> None:
    worker = Worker(settings, [Recorder()], slots=1)
    worker.stop(grace_s=0.0)
    await worker.run()
    assert worker.joined.is_set()
    assert not (await queue.status()).workers


# A server that is not there


async def test_a_worker_waits_for_its_server_and_is_not_ready_until_then(
    one: Server, caplog: pytest.LogCaptureFixture
) -> None:
    one.stop()
    worker = Worker(one.settings, [Recorder()], slots=1)
    running = asyncio.create_task(worker.run())
    try:
        await eventually(lambda: "not ready: no answer from" in caplog.text)
        assert not worker.joined.is_set()
        assert not running.done()
        one.start()
        await asyncio.wait_for(worker.joined.wait(), 30)
        async with AsyncLeanQClient(one.settings) as lean:
            assert await lean.echo(b"here") == b"here"
    finally:
        worker.stop(0.0)
        await asyncio.wait_for(running, 30)


async def test_a_worker_that_waits_for_its_server_can_be_stopped(
    one: Server, caplog: pytest.LogCaptureFixture
) -> None:
    one.stop()
    worker = Worker(one.settings, [Recorder()], slots=1)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: "not ready" in caplog.text)
    worker.stop()
    await asyncio.wait_for(running, 5)
    assert not worker.joined.is_set()


async def test_a_worker_that_is_stopped_while_it_joins_leaves_the_shards_that_know_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = WorkerQueue.register

    async def register_where_it_answers(queue: WorkerQueue, *what: Any) -> None:
        await register(queue, *what)
        if queue.shard.keys.shard == 1:
            raise UnavailableError("its answer was lost")

    monkeypatch.setattr(WorkerQueue, "register", register_where_it_answers)
    sharded = replace(settings, shards=2)
    worker = Worker(sharded, [Recorder()], slots=1)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: "not ready" in caplog.text)
    assert {len(status.workers) for status in await _statuses(sharded)} == {1}
    worker.stop()
    await asyncio.wait_for(running, 30)
    assert not worker.joined.is_set()
    assert {len(status.workers) for status in await _statuses(sharded)} == {0}


async def _statuses(settings: Settings) -> list[Status]:
    found = []
    for shard in range(settings.shards):
        queue = Queue(settings, shard)
        found.append(await queue.status())
        await queue.close()
    return found
