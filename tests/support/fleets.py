"""What the tests of clients and workers share: drivers that tell, workers, looks at the queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis
from msgspec import structs

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.consumer.claim_state import Demand
from leanq.consumer.consumer import WorkerTimings
from leanq.errors import UnavailableError, WorkerError
from leanq.lean.driver import Driver, EchoDriver
from leanq.queue.keys import new_request_id
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Status, Submission, WorkerRow
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_request
from leanq.states import States
from leanq.worker import Worker
from support.command_server import Command
from support.paths import ROOT
from support.producer.routes import reply_to
from support.queue.queues import Queue

HOUR_S = 3600.0
SWEEP_TIMEOUT_S = 30.0
WORKER_TIMEOUT_S = 30.0


def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Waits, outside of any event loop, until ``condition`` holds; fails after the deadline."""
    started = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started
        assert waited_s < deadline_s, f"not within {deadline_s} s: {condition}"
        # Looks cost CPU time that what is waited for may need.
        time.sleep(min(0.05, max(0.005, waited_s / 10)))


def until_stalled(
    condition: Callable[[], bool], progress: Callable[[], object], stalled_s: float = 60.0
) -> None:
    """Waits as :func:`until` does, as long as ``progress`` says something new within
    ``stalled_s``: a busy machine is slow, and what has gone wrong stands still. Where that alone
    does not end it, a bound of fifteen minutes does."""
    bound_s = time.monotonic() + 900.0
    seen, changed_s = progress(), time.monotonic()
    while not condition():
        if (now := progress()) != seen:
            seen, changed_s = now, time.monotonic()
        stood_s = time.monotonic() - changed_s
        assert stood_s < stalled_s, f"stands still for {stalled_s} s at {seen}: {condition}"
        assert time.monotonic() < bound_s, f"not within fifteen minutes: {condition}"
        time.sleep(0.05)


class Recorder(EchoDriver):
    """An echo that tells what it ran, and keeps payloads that begin with ``held`` to itself
    until :meth:`let_go`."""

    def __init__(self, environment: str = "echo") -> None:
        self.environment = environment
        self.started: list[bytes] = []
        self.running: list[bytes] = []
        self.stopped: list[bytes] = []
        self.most = 0

    async def open(self, _states: States) -> None:
        self._loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(self.gate.set)

    async def run(self, request: Request) -> Reply:
        payload = request.payload
        self.started.append(payload)
        self.running.append(payload)
        self.most = max(self.most, len(self.running))
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.stopped.append(payload)
            raise
        finally:
            self.running.remove(payload)

    async def answer(self, request: Request) -> Reply:
        if not request.payload.startswith(b"held"):
            return await super().run(request)
        await self.gate.wait()
        return Reply(payload=request.payload)


class Failing(Recorder):
    """Fails with ``error`` while there are failures left."""

    def __init__(self, error: Exception, failures: int) -> None:
        super().__init__()
        self.error, self.failures = error, failures

    async def answer(self, request: Request) -> Reply:
        if self.failures > 0:
            self.failures -= 1
            raise self.error
        return await super().answer(request)


class Gated(Recorder):
    """Answers each payload when its gate opens, and those in ``fails`` with a WorkerError once."""

    def __init__(self, *payloads: bytes) -> None:
        super().__init__()
        self.gates = {payload: asyncio.Event() for payload in payloads}
        self.fails: set[bytes] = set()

    async def answer(self, request: Request) -> Reply:
        await self.gates[request.payload].wait()
        if request.payload in self.fails:
            self.fails.remove(request.payload)
            raise WorkerError("no room")
        return Reply(payload=request.payload)


@contextlib.contextmanager
def serving(
    settings: Settings, driver: EchoDriver | None = None, *, slots: int = 64
) -> Iterator[Worker]:
    """A worker in a thread of its own, for tests that wait without an event loop."""
    worker = Worker(settings, [driver or EchoDriver()], slots=slots)
    faults: list[BaseException] = []
    loop = asyncio.new_event_loop()

    def work() -> None:
        try:
            loop.run_until_complete(worker.run())
        except BaseException as fault:
            faults.append(fault)
        finally:
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: worker.joined.is_set() or bool(faults))
        yield worker
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(worker.stop, 0.0)
        thread.join(WORKER_TIMEOUT_S)
        assert not thread.is_alive(), "the worker did not stop"
    if faults:
        raise faults[0]


@contextlib.asynccontextmanager
async def working(
    settings: Settings,
    *drivers: Driver,
    slots: int = 8,
    wire: Wire | None = None,
    timings: WorkerTimings | None = None,
) -> AsyncIterator[Worker]:
    """A worker in this event loop, with ``wire`` in place of its own queue."""
    queues = [wire] if wire else None
    worker = Worker(
        settings, drivers or [EchoDriver()], slots=slots, shards=queues, timings=timings
    )
    task = asyncio.create_task(worker.run())
    joined = asyncio.create_task(worker.joined.wait())
    try:
        await asyncio.wait(
            {task, joined}, return_when=asyncio.FIRST_COMPLETED, timeout=WORKER_TIMEOUT_S
        )
        assert task.done() or joined.done(), "the worker did not join"
        if task.done():
            task.result()
        yield worker
    finally:
        joined.cancel()
        if wire:
            wire.mend()
        worker.stop(grace_s=0.0)
        async with asyncio.timeout(WORKER_TIMEOUT_S):
            await task


def is_idle(worker: Worker) -> bool:
    """Whether a worker of one shard has claimed, and waits for a wake-up or an end."""
    return worker.consumers[0].state.demand in (Demand.QUIET, Demand.EXPECTING)


class Wire(Queue):
    """A queue whose scripts a test can hold up or make fail, by the scripts' names.

    ``lost`` names those whose next answer is lost although they happened.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.calls: Counter[str] = Counter()
        self.lost: set[str] = set()
        self._before: dict[str, asyncio.Event] = {}
        self._after: dict[str, asyncio.Event] = {}
        self.waiting: list[str] = []

    def hold_up(self, name: str, *, after: bool = False) -> Callable[[], None]:
        """Holds up calls, or the answers ``after`` them, until what this returns is called."""
        places = self._after if after else self._before
        gate = places[name] = asyncio.Event()

        def let_go() -> None:
            places.pop(name, None)
            gate.set()

        return let_go

    def mend(self) -> None:
        for gate in (*self._before.values(), *self._after.values()):
            gate.set()
        self._before.clear()
        self._after.clear()

    async def run(
        self, name: str, uploads: Mapping[str, bytes] | None = None, /, **arguments: Any
    ) -> Any:
        self.calls[name] += 1
        await self._pass(self._before.get(name), name)
        answer = await super().run(name, uploads, **arguments)
        await self._pass(self._after.get(name), name)
        if name in self.lost:
            self.lost.remove(name)
            raise UnavailableError("the answer was lost")
        return answer

    async def _pass(self, gate: asyncio.Event | None, name: str) -> None:
        if gate:
            self.waiting.append(name)
            await gate.wait()
            self.waiting.remove(name)


def hurry(monkeypatch: pytest.MonkeyPatch, **timings: float) -> None:
    """Gives all clients of the test other timings."""
    for kind in (LeanQClient, AsyncLeanQClient):
        monkeypatch.setattr(kind, "timings", replace(kind.timings, **timings))


def submission(request_id: str, body: bytes, *, longest_run_ms: int = 60_000) -> Submission:
    return Submission(request_id, "echo", "default", 1, 0, longest_run_ms, body)


def echo_body(payload: bytes, delay_s: float = 0.0) -> bytes:
    return pack_request(Request(op="echo", payload=payload, delay_s=delay_s))


async def counter(queue: Queue, name: str) -> int:
    return (await queue.status()).counters.get(name, 0)


def counts(queue: Queue, name: str, value: int) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return await counter(queue, name) == value

    return reached


async def ask(
    client: AsyncLeanQClient,
    payload: bytes,
    delay_s: float = 0.0,
    environment: str = "echo",
    affinity: tuple[str, ...] = (),
) -> Reply:
    """The whole reply to an echo, in any environment."""
    request_id = new_request_id(client.settings.shards)
    item = submission(request_id, echo_body(payload, delay_s))
    return await reply_to(client, structs.replace(item, environment=environment, affinity=affinity))


def look(settings: Settings) -> Status:
    """One look at the queue, outside of any event loop."""

    async def status() -> Status:
        queue = Queue(settings)
        try:
            return await queue.status()
        finally:
            await queue.close()

    return asyncio.run(status())


def sweep(settings: Settings) -> None:
    """Passes over what was withdrawn while no worker was there, as the next worker would."""

    async def claim_nothing() -> None:
        queue = Queue(settings)
        try:
            # What is paused, perhaps by a test that failed, is passed over by every claim.
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                while rows := (await queue.status()).priorities:
                    environments = sorted({row.environment for row in rows})
                    found = await queue.claim("sweeper", environments, 1, busy=0, token=new_token())
                    assert not found.jobs, "a request was left in the queue"
            await queue.release("sweeper", [], leave=True)
        finally:
            await queue.close()

    asyncio.run(claim_nothing())


def connections(settings: Settings) -> set[int]:
    """The ids of all connections to the server."""
    with redis.Redis.from_url(settings.url) as connection:
        mine = connection.client_id()
        return {int(row["id"]) for row in connection.client_list() if int(row["id"]) != mine}


def kill_connections(settings: Settings) -> None:
    """Cuts every connection to the server but the one that says so."""
    with redis.Redis.from_url(settings.url) as connection:
        connection.client_kill_filter(_type="normal", skipme=True)


class WorkerProcess:
    """``leanq worker --driver echo``, as the user starts it, after a ``prelude`` in Python."""

    def __init__(
        self, settings: Settings, *, slots: int = 4, grace_s: float = 10.0, prelude: str = ""
    ) -> None:
        environ = {name: text for name, text in os.environ.items() if name[:6] != "LEANQ_"}
        environ |= {
            "PYTHONPATH": str(ROOT),
            "LEANQ_URL": settings.url,
            "LEANQ_PREFIX": settings.prefix,
            "LEANQ_LEASE_S": str(settings.lease_s),
            "LEANQ_MAX_ATTEMPTS": str(settings.max_attempts),
        }
        options = ("--driver", "echo", "--slots", str(slots), "--grace", str(grace_s))
        self.process = Command(
            ("worker", *options),
            env=environ,
            cwd=ROOT,
            prelude=prelude,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def row(self, status: Status) -> WorkerRow | None:
        """How the fleet knows it; None before it has joined."""
        rows = (row for row in status.workers if f"-{self.process.pid}-" in row.worker)
        return next(rows, None)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def worker_processes(
    settings: Settings,
    count: int = 1,
    *,
    slots: int = 4,
    grace_s: float = 10.0,
    prelude: str = "",
) -> Iterator[Sequence[WorkerProcess]]:
    """Workers as processes; those that are still there in the end are killed."""
    started = [
        WorkerProcess(settings, slots=slots, grace_s=grace_s, prelude=prelude) for _ in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.end()


def short_lease(settings: Settings, lease_s: float = 0.5) -> Settings:
    return replace(settings, lease_s=lease_s)


def new_token() -> str:
    return f"{secrets.token_urlsafe(9)}:"
