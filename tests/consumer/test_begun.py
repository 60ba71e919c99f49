"""Requests that come along with their wake-up: begun before they are claimed, by an idle worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.fleets import (
    Failing,
    Recorder,
    Wire,
    ask,
    counts,
    echo_body,
    is_idle,
    new_token,
    submission,
    working,
)
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import Timings
from leanq.errors import WorkerError
from leanq.queue.queue import Queue
from leanq.queue.results import Wakeup, read_wakeup
from leanq.queue.settings import Settings
from leanq.worker import Worker

# Nothing but a wake-up moves the worker within a test.
SILENT = Timings(block_s=1e6)


@pytest.fixture
def silent(settings: Settings) -> Settings:
    return replace(settings, lease_s=1e6)


async def listens(queue: Queue, worker: Worker) -> None:
    """Waits until an idle worker blocks on its wake-up at the server."""
    await eventually(lambda: is_idle(worker))
    await blocks(queue)


async def blocks(queue: Queue) -> None:
    """Waits until the only worker blocks on its wake-up at the server."""

    async def seen() -> bool:
        # A client may block, too, on its inbox.
        found = await queue.call(lambda c: c.client_list())
        return any(each["cmd"] == "blpop" and "b" in each["flags"] for each in found)

    await eventually(seen)


def has_taken_its_wakeup(queue: Queue) -> Callable[[], Awaitable[bool]]:
    """Whether a request waits whose wake-up a worker has taken."""

    async def taken() -> bool:
        waits = (await queue.status()).counters.get("waiting:echo") == 1
        return waits and not await queue.call(lambda c: c.exists(queue.keys.wakeup("echo")))

    return taken


async def test_what_ends_at_once_needs_no_claim(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire = Wire(silent)
    async with working(silent, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        before = wire.calls["claim"] + wire.calls["exchange"]
        reply = await ask(lean, b"x")
        assert (reply.payload, reply.attempts, reply.worker) == (b"x", 1, worker.id)
        assert wire.calls["complete"] == 1
        assert wire.calls["claim"] + wire.calls["exchange"] == before
        await eventually(lambda: is_idle(worker))
    counters = (await queue.status()).counters
    assert [counters[name] for name in ("claimed", "settled", "waiting:echo")] == [1, 1, 0]


async def test_what_takes_longer_is_claimed_while_it_runs(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, slots=1, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("claim")
        asked = asyncio.create_task(ask(lean, b"held"))
        # It runs before any claim has reached the server.
        await eventually(lambda: driver.running == [b"held"])
        assert not (await queue.status()).workers[0].held
        let_go()
        await eventually(counts(queue, "claimed", 1))
        driver.let_go()
        assert (await asked).attempts == 1
        assert driver.started == [b"held"]
        assert wire.calls["complete"] == 0


async def test_what_a_claim_under_way_may_bring_is_not_begun(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    # That with which the worker begins.
    let_go = wire.hold_up("claim")
    async with working(silent, driver, wire=wire, timings=SILENT):
        await eventually(lambda: wire.waiting == ["claim"])
        asked = asyncio.create_task(ask(lean, b"x"))
        await eventually(has_taken_its_wakeup(queue))
        assert driver.started == []
        let_go()
        assert (await asked).attempts == 1
    assert (driver.started, wire.calls["complete"]) == ([b"x"], 0)


async def test_what_ends_during_its_claim_is_settled_with_its_lease(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("claim", after=True)
        asked = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: wire.waiting == ["claim"])
        driver.let_go()
        await eventually(lambda: driver.running == [])
        let_go()
        assert (await asked).attempts == 1
        assert (driver.started, driver.stopped) == ([b"held"], [])


async def test_what_another_worker_claimed_first_is_stopped(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, slots=1, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("claim")
        asked = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: driver.running == [b"held"])
        (job,) = (await queue.claim("other", ["echo"], 1, busy=0, token=new_token())).jobs
        let_go()
        await eventually(lambda: driver.stopped == [b"held"])
        # Its only slot is free for what comes next, and the other worker's lease is untouched.
        assert await ask(lean, b"next")
        assert await queue.release("other", [(job.request_id, job.token)], leave=True) == 1
        driver.let_go()
        assert (await asked).payload == b"held"


async def test_what_is_withdrawn_before_its_claim_is_stopped(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, slots=1, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("claim")
        asked = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: driver.running == [b"held"])
        asked.cancel()
        await eventually(counts(queue, "verdict:cancelled", 1))
        let_go()
        await eventually(lambda: driver.stopped == [b"held"])
        assert (await ask(lean, b"next")).payload == b"next"


@pytest.mark.parametrize("unusual", ["weights", "paused tenant", "nothing"])
async def test_a_completion_that_is_refused_is_claimed(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient, unusual: str
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("complete")
        asked = asyncio.create_task(ask(lean, b"x"))
        await eventually(lambda: wire.waiting == ["complete"])
        if unusual == "weights":
            await queue.set_weight("other", 2.0)
        elif unusual == "paused tenant":
            await queue.set_paused("tenant", "other", paused=True)
        let_go()
        assert (await asked).attempts == 1
        assert len(driver.started) == (1 if unusual == "nothing" else 2)
    await queue.set_weight("other", None)
    await queue.set_paused("tenant", "other", paused=False)


async def test_the_lost_answer_to_a_completion_loses_nothing(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire = Wire(silent)
    async with working(silent, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        wire.lost.add("complete")
        assert (await ask(lean, b"x")).payload == b"x"
        assert (await ask(lean, b"y")).payload == b"y"
    counters = (await queue.status()).counters
    assert (counters["claimed"], counters["settled"]) == (2, 2)


async def test_what_its_machine_fails_at_waits_for_a_claim(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    driver = Failing(WorkerError("no room"), 1)
    timings = replace(SILENT, pause_after_failure_s=0.01)
    async with working(silent, driver, slots=1, timings=timings) as worker:
        await listens(queue, worker)
        assert (await ask(lean, b"x")).payload == b"x"
        assert driver.started == [b"x", b"x"]


async def test_a_worker_that_is_told_to_stop_leaves_what_it_has_not_claimed(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, slots=1, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("claim")
        asked = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: driver.running == [b"held"])
        worker.stop(grace_s=0.0)
        let_go()
    assert driver.stopped == [b"held"]
    async with working(silent, timings=SILENT):
        reply = await asked
    assert (reply.payload, reply.attempts) == (b"held", 1)


async def test_identical_requests_have_one_run(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    """The second waits behind the claim of the first, and joins it."""
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, slots=2, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("claim", after=True)
        one, two = (
            structs.replace(submission(f"0-{number}", echo_body(b"held")), digest="same")
            for number in (1, 2)
        )
        await queue.submit("client", [one])
        await eventually(lambda: wire.waiting == ["claim"])
        await queue.submit("client", [two])
        let_go()
        await eventually(lambda: is_idle(worker))
        assert driver.started == [b"held"]
        driver.let_go()
        await eventually(counts(queue, "verdict:echo", 2))
    assert driver.started == [b"held"]


async def test_a_token_that_no_worker_waited_for_is_a_wakeup_alone(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    asked = asyncio.create_task(ask(lean, b"x"))
    await eventually(counts(queue, "waiting:echo", 1))
    # A token that is taken in the moment in which it comes is never as old.
    old_at_s = time.monotonic() + 0.02
    await eventually(lambda: time.monotonic() > old_at_s)
    wire = Wire(silent)
    async with working(silent, wire=wire, timings=SILENT):
        assert (await asked).payload == b"x"
        assert wire.calls["complete"] == 0


@pytest.mark.parametrize("size", [16_000, 17_000])
async def test_a_large_request_comes_without_its_wakeup(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient, size: int
) -> None:
    wire = Wire(silent)
    async with working(silent, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        assert (await ask(lean, bytes(size))).payload == bytes(size)
        assert wire.calls["complete"] == (size < 16_384)


@given(st.one_of(st.binary(), st.binary().map(lambda rest: b"0-x\0\x01" + rest)))
def test_any_bytes_are_a_wakeup(data: bytes) -> None:
    assert isinstance(read_wakeup(data, "token", 1e12), Wakeup)


async def test_what_a_machine_fails_at_is_left_to_another_worker(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    failing, other = Failing(WorkerError("no room"), 1), Recorder()
    timings = replace(SILENT, pause_after_failure_s=1e6)
    async with working(silent, failing, timings=timings) as first:
        await listens(queue, first)
        async with working(silent, other, timings=SILENT) as second, asyncio.timeout(30.0):
            await eventually(lambda: is_idle(second))
            assert (await ask(lean, b"x")).worker == second.id
    assert (failing.started, other.started) == ([b"x"], [b"x"])


async def test_what_a_worker_that_leaves_has_begun_is_left_to_another_worker(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver, other = Wire(silent), Recorder(), Recorder()
    async with working(silent, driver, slots=1, wire=wire, timings=SILENT) as first:
        await listens(queue, first)
        async with working(silent, other, timings=SILENT) as second, asyncio.timeout(30.0):
            await eventually(lambda: is_idle(second))
            let_go = wire.hold_up("complete")
            wire.hold_up("claim")
            asked = asyncio.create_task(ask(lean, b"held"))
            await eventually(lambda: driver.running == [b"held"])
            first.stop(grace_s=0.0)
            let_go()
            other.let_go()
            assert (await asked).worker == second.id


async def test_nothing_is_begun_while_a_lost_claim_may_have_brought_something(
    silent: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(silent), Recorder()
    async with working(silent, driver, wire=wire, timings=SILENT) as worker:
        await listens(queue, worker)
        let_go = wire.hold_up("reconcile")
        wire.lost.add("claim")
        first = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: wire.waiting == ["reconcile"])
        await blocks(queue)
        second = asyncio.create_task(ask(lean, b"x"))
        await eventually(has_taken_its_wakeup(queue))
        assert driver.started == [b"held"]
        let_go()
        driver.let_go()
        assert [(await asked).payload for asked in (first, second)] == [b"held", b"x"]
