"""Workers whose answers get lost, whose leases end early, and whose requests are withdrawn."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest
from support.fleets import (
    HOUR_S,
    Gated,
    Recorder,
    Wire,
    ask,
    counter,
    counts,
    echo_body,
    is_idle,
    short_lease,
    submission,
    working,
)
from support.queue.queues import Queue
from support.servers import own_server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings
from leanq.queue.worker_queue import reap
from leanq.worker import Worker

# Answers lost on the wire


@pytest.mark.parametrize("slots", [1, 4])
async def test_a_claim_whose_answer_is_lost_is_reconciled(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, slots: int
) -> None:
    driver, wire = Recorder(), Wire(settings)
    tasks = [asyncio.create_task(ask(lean, b"%d" % n)) for n in range(8)]
    await eventually(counts(queue, "submitted", 8))
    wire.lost = {"claim"}
    async with working(settings, driver, wire=wire, slots=slots):
        replies = await asyncio.gather(*tasks)
    assert not wire.lost
    assert sorted(driver.started) == [b"%d" % n for n in range(8)]
    assert {reply.attempts for reply in replies} == {1}
    assert driver.most <= slots


@pytest.mark.parametrize("name", ["claim", "renew", "reconcile"])
async def test_a_lost_answer_settles_nothing_twice(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, name: str
) -> None:
    driver, short = Recorder(), short_lease(settings)
    wire = Wire(short)
    async with working(short, driver, wire=wire, slots=2):
        tasks = [asyncio.create_task(ask(lean, b"held %d" % n)) for n in range(2)]
        await eventually(lambda: len(driver.running) == 2)
        # Both slots are full, so the next claim is the one that settles.
        wire.lost = {name, "claim"}
        driver.let_go()
        replies = await asyncio.gather(*tasks)
        await eventually(lambda: not wire.lost)
        assert (await ask(lean, b"next")).attempts == 1
    assert {reply.attempts for reply in replies} == {1}
    assert len(driver.started) == 3
    assert await counter(queue, "settled") == 3
    assert await counter(queue, "fenced") == 0


async def test_a_worker_leaves_with_what_an_unanswered_claim_brought(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    task = asyncio.create_task(ask(lean, b"given back"))
    await eventually(counts(queue, "submitted", 1))
    wire = Wire(settings)
    wire.hold_up("claim", after=True)
    async with working(settings, wire=wire) as worker:
        await eventually(lambda: wire.waiting == ["claim"])
        worker.stop(grace_s=0.0)
        await eventually(counts(queue, "released", 1))
    async with working(settings):
        assert (await task).attempts == 1


async def test_a_silent_server_keeps_no_worker_from_ending() -> None:
    with own_server() as server:
        worker = Worker(server.settings, [Recorder()], slots=1, timings=WorkerTimings(leave_s=0.1))
        task = asyncio.create_task(worker.run())
        await worker.joined.wait()
        await eventually(lambda: is_idle(worker))
        server.send(signal.SIGSTOP)
        worker.consumers[0].state.notified()
        worker.stop(grace_s=0.0)
        await asyncio.wait_for(task, 10)


# Leases that end early


async def test_a_result_after_a_reap_is_fenced(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    short = short_lease(settings)
    wire, late, second = Wire(short), Recorder(), Recorder()
    async with working(short, late, wire=wire, slots=1) as worker:
        task = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: late.running == [b"held"])
        # No sign of life any more, though it runs on: another takes it up and ends it.
        go_on = wire.hold_up("renew")
        await eventually(lambda: wire.waiting == ["renew"])
        async with working(short, second, slots=1):
            await eventually(lambda: second.running == [b"held"])
            second.let_go()
            reply = await task
        assert reply.attempts == 2
        assert reply.worker != worker.id
        late.let_go()
        await eventually(lambda: worker.consumers[0].requests.has_results)
        go_on()
        await eventually(lambda: not worker.consumers[0].requests.jobs)
    assert await counter(queue, "settled") == 1


async def test_a_request_that_comes_back_runs_once_at_a_time(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    short = short_lease(settings)
    wire, driver = Wire(short), Recorder()
    async with working(short, driver, wire=wire, slots=2) as worker:
        task = asyncio.create_task(ask(lean, b"held"))
        await eventually(lambda: driver.running == [b"held"])
        # The worker believes in a lease that lapses meanwhile, and claims the request again.
        go_on = wire.hold_up("renew", after=True)
        await eventually(lambda: wire.waiting == ["renew"])

        async def reaped() -> bool:
            return (await reap(queue)).requeued == 1

        await eventually(reaped)
        go_on()
        await eventually(lambda: len(driver.started) == 2)
        await eventually(lambda: driver.stopped == [b"held"])
        assert driver.running == [b"held"]
        await eventually(lambda: worker.slot_pool.slots.taken == 1)
        driver.let_go()
        assert (await task).attempts == 2
    assert await counter(queue, "settled") == 1


async def test_a_request_that_overruns_is_taken_away(settings: Settings, queue: Queue) -> None:
    short = replace(short_lease(settings), max_attempts=1)
    driver = Recorder()
    async with working(short, driver, slots=1):
        body = echo_body(b"held")
        await queue.submit("client", [submission("0-stuck", body, longest_run_ms=50)])
        await eventually(lambda: driver.stopped == [b"held"])
        await eventually(counts(queue, "verdict:poisoned", 1))
        await queue.submit("client", [submission("0-next", echo_body(b"next"))])
        await eventually(counts(queue, "settled", 1))


async def test_a_withdrawn_request_keeps_its_slot_until_it_has_stopped(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    class Slow(Recorder):
        async def answer(self, request: Request) -> Reply:
            try:
                return await super().answer(request)
            except asyncio.CancelledError:
                await self.gate.wait()
                raise

    driver = Slow()
    async with working(settings, driver, slots=1) as worker:
        first = asyncio.create_task(lean.echo(b"slow", delay_s=HOUR_S))
        await eventually(lambda: driver.running == [b"slow"])
        first.cancel()
        second = asyncio.create_task(lean.echo(b"second"))
        await eventually(lambda: not worker.consumers[0].requests.jobs)
        await eventually(lambda: not worker.consumers[0].state.listening)
        assert driver.running == [b"slow"]
        driver.let_go()
        assert await second == b"second"
    assert driver.most == 1


async def test_a_withdrawal_amid_settling_loses_no_other_result(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    wire, driver = Wire(settings), Gated(b"one", b"two")
    async with working(settings, driver, wire=wire, slots=2) as worker:
        one, two = (asyncio.create_task(lean.echo(payload)) for payload in driver.gates)
        await eventually(lambda: len(driver.running) == 2)
        go_on = wire.hold_up("claim")
        driver.gates[b"one"].set()
        await eventually(lambda: wire.waiting == ["claim"])
        one.cancel()
        await eventually(lambda: len(worker.consumers[0].requests.jobs) == 1)
        driver.gates[b"two"].set()
        await eventually(lambda: worker.consumers[0].requests.has_results)
        go_on()
        assert await two == b"two"
        await eventually(lambda: not worker.consumers[0].requests.jobs)
    assert await counter(queue, "verdict:cancelled") == 1


async def test_a_failure_while_another_is_given_back_is_given_back_too(
    settings: Settings, lean: AsyncLeanQClient
) -> None:
    quick = WorkerTimings(pause_after_failure_s=0.01)
    wire, driver = Wire(settings), Gated(b"one", b"two")
    driver.fails = {b"one", b"two"}
    async with working(settings, driver, wire=wire, slots=2, timings=quick):
        asked = [asyncio.create_task(ask(lean, payload)) for payload in driver.gates]
        await eventually(lambda: len(driver.running) == 2)
        go_on = wire.hold_up("release", after=True)
        driver.gates[b"one"].set()
        await eventually(lambda: wire.waiting == ["release"])
        driver.gates[b"two"].set()
        await eventually(lambda: not driver.running)
        go_on()
        assert [reply.attempts for reply in await asyncio.gather(*asked)] == [2, 2]
