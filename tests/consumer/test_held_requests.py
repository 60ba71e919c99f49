"""Held requests run side by side, whether or not they wait for anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.waiting import eventually

from leanq.consumer.held_requests import HeldRequests
from leanq.consumer.slot_pool import SlotPool
from leanq.fleet import logging as logs
from leanq.lean.driver import EchoDriver
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Job
from leanq.queue.wire import pack_request, unpack_reply

SLOTS = 20
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Driver(EchoDriver):
    """Runs ``work`` of each request, and notes the task that it ran in and what that logs about."""

    def __init__(self) -> None:
        self.work: Callable[[bytes], Awaitable[object]] = self.nothing
        self.gate = asyncio.Event()
        self.tasks: dict[bytes, asyncio.Task[object] | None] = {}
        self.logged: dict[bytes, logs.About | None] = {}
        self.tenants: dict[bytes, str] = {}

    async def run(self, request: Request) -> Reply:
        self.tasks[request.payload] = asyncio.current_task()
        self.tenants[request.payload] = request.tenant
        await self.work(request.payload)
        self.logged[request.payload] = logs.ABOUT.get()
        return Reply(payload=request.payload)

    async def nothing(self, _payload: bytes) -> None:
        pass

    async def wait(self, _payload: bytes) -> None:
        await self.gate.wait()

    async def wait_where_held(self, payload: bytes) -> None:
        if payload.startswith(b"held"):
            await self.gate.wait()

    async def catch_where_held(self, payload: bytes) -> None:
        try:
            await self.wait_where_held(payload)
        except asyncio.CancelledError:
            await asyncio.sleep(0)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(SLOTS, lambda: None, pause_after_failure_s=2.0)


@pytest.fixture
async def requests(driver: Driver, pool: SlotPool) -> AsyncIterator[HeldRequests]:
    held = HeldRequests("w", {"echo": driver}, pool, lambda: None, 60.0, 1000)
    yield held
    async with asyncio.timeout(30.0):
        await held.stop()
    assert (pool.slots.taken, pool.slots.waiting) == (0, 0)


def job(payload: bytes, traceparent: str = "") -> Job:
    body = pack_request(Request("echo", payload=payload, traceparent=traceparent))
    return Job(payload.decode(), "echo", "t", 1, 0.0, body, isolated=False)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def settled(requests: HeldRequests) -> dict[str, bytes | None]:
    return {
        item.request_id: unpack_reply(item.request_id, item.reply).payload
        for item in requests.next_settlements()
    }


async def until_settled(requests: HeldRequests, payloads: list[bytes]) -> None:
    expected = {payload.decode(): payload for payload in payloads}
    await eventually(lambda: settled(requests) == expected)


async def test_requests_that_wait_for_nothing_share_a_task(
    requests: HeldRequests, driver: Driver
) -> None:
    payloads = numbered(3 * SLOTS)
    for payload in payloads:
        requests.start(job(payload))
    await until_settled(requests, payloads)
    assert len(set(driver.tasks.values())) == 1


async def test_the_record_says_whose_a_request_is_whatever_its_body_says(
    requests: HeldRequests, driver: Driver
) -> None:
    for payload, tenant in ((b"1", "alice"), (b"2", "")):
        body = pack_request(Request("echo", payload=payload, tenant="mallory"))
        requests.start(replace(job(payload), body=body, tenant=tenant))
    await until_settled(requests, [b"1", b"2"])
    assert driver.tenants == {b"1": "alice", b"2": ""}


async def test_requests_that_wait_run_side_by_side(
    requests: HeldRequests, driver: Driver, pool: SlotPool
) -> None:
    driver.work = driver.wait
    payloads = numbered(SLOTS + 5)
    for payload in payloads:
        requests.start(job(payload))
    await eventually(lambda: len(driver.tasks) == SLOTS)
    assert (pool.slots.taken, pool.slots.waiting) == (SLOTS, 5)
    assert len(set(driver.tasks.values())) == SLOTS
    driver.gate.set()
    await until_settled(requests, payloads)


async def test_one_that_waits_does_not_hold_up_those_behind_it(
    requests: HeldRequests, driver: Driver
) -> None:
    driver.work = driver.wait_where_held
    payloads = numbered(5)
    for payload in (b"held", *payloads):
        requests.start(job(payload))
    await until_settled(requests, payloads)
    requests.start(job(b"later"))
    await until_settled(requests, [*payloads, b"later"])


async def test_what_is_dropped_before_it_began_never_runs(
    requests: HeldRequests, driver: Driver, pool: SlotPool
) -> None:
    for payload in numbered(3):
        requests.start(job(payload))
    requests.drop("1")
    assert pool.slots.taken == 2
    await until_settled(requests, [b"0", b"2"])
    assert b"1" not in driver.tasks


async def test_a_driver_that_catches_its_cancellation_has_no_other_request_run_there(
    requests: HeldRequests, driver: Driver, pool: SlotPool
) -> None:
    driver.work = driver.catch_where_held
    holding = [b"held%d" % number for number in range(SLOTS)]
    for payload in (*holding, b"next"):
        requests.start(job(payload))
    await eventually(lambda: len(driver.tasks) == SLOTS)
    assert pool.slots.waiting == 1
    requests.drop("held3")
    await until_settled(requests, [b"next"])
    assert driver.tasks[b"next"] not in [driver.tasks[payload] for payload in holding]


async def test_a_slot_is_kept_until_the_driver_has_cleaned_up(
    requests: HeldRequests, driver: Driver, pool: SlotPool
) -> None:
    cleaned = asyncio.Event()

    async def clean_up(payload: bytes) -> None:
        try:
            await driver.wait_where_held(payload)
        finally:
            await cleaned.wait()

    driver.work = clean_up
    requests.start(job(b"held"))
    await eventually(lambda: b"held" in driver.tasks)
    requests.drop("held")
    await asyncio.sleep(0.01)
    assert (pool.slots.taken, requests.jobs) == (1, [])
    cleaned.set()
    await eventually(lambda: pool.slots.taken == 0)


async def test_nothing_begins_in_a_worker_that_stops(
    requests: HeldRequests, driver: Driver, pool: SlotPool
) -> None:
    driver.work = driver.wait
    begun, ahead = numbered(SLOTS), b"ahead"
    for payload in (*begun, ahead):
        requests.start(job(payload))
    await eventually(lambda: len(driver.tasks) == SLOTS)
    requests.start(job(b"last"))
    async with asyncio.timeout(30.0):
        await requests.stop()
    assert set(driver.tasks) == set(begun)
    assert (pool.slots.taken, pool.slots.waiting) == (0, 0)
    assert {each.request_id for each in requests.jobs} == {
        *(payload.decode() for payload in begun),
        "ahead",
        "last",
    }


async def test_what_is_logged_is_about_the_request_that_runs(
    requests: HeldRequests, driver: Driver
) -> None:
    requests.start(job(b"traced", TRACE))
    requests.start(job(b"plain"))
    await until_settled(requests, [b"traced", b"plain"])
    assert driver.logged == {
        b"traced": logs.About("traced", 1, "w", "echo", TRACE),
        b"plain": logs.About("plain", 1, "w", "echo"),
    }


WHAT_HAPPENS = st.lists(
    st.tuples(
        st.sampled_from(("start", "start_isolated", "drop", "end", "turn", "return")),
        st.integers(0, 4),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(WHAT_HAPPENS)
@settings(max_examples=200, deadline=None)
def test_slots_are_counted_right_whatever_happens(steps: list[tuple[str, int]]) -> None:
    asyncio.run(counted(steps))


async def counted(steps: list[tuple[str, int]]) -> None:
    """Each request has a lease of its own; those that a claim brings anew have another one."""
    driver, pool = Driver(), SlotPool(3, lambda: None, pause_after_failure_s=2.0)
    held = HeldRequests("w", {"echo": driver}, pool, lambda: None, 60.0, 1000)
    ends = {b"%d" % number: asyncio.Event() for number in range(5)}

    async def work(payload: bytes) -> None:
        await ends[payload].wait()

    driver.work = work
    for step, number in steps:
        one = job(b"%d" % number)
        match step:
            case "start":
                held.start(replace(one, token="another"))
            case "start_isolated":
                held.start(replace(one, token="another", isolated=True))
            case "drop":
                held.drop(str(number))
            case "end":
                ends[b"%d" % number].set()
            case "turn":
                await asyncio.sleep(0)
            case "return":
                return_waiting(held)
        slots = pool.slots
        assert 0 <= slots.isolated <= slots.taken <= slots.count
        assert 0 <= slots.waiting <= len(held.jobs)
        assert not slots.reserved
    return_waiting(held)
    async with asyncio.timeout(30.0):
        await held.stop()
    assert (pool.slots.taken, pool.slots.waiting, pool.slots.isolated) == (0, 0, 0)


def return_waiting(held: HeldRequests) -> None:
    """What is given back is the worker's still, and each once."""
    before = len(held.returns["requeue"])
    held.return_waiting()
    given = [request_id for request_id, _ in held.returns["requeue"][before:]]
    assert len(given) == len(set(given))
    assert set(given) <= {each.request_id for each in held.jobs}
