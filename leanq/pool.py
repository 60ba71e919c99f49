"""A pool: the operations of a client in this process, for one machine and without a queue."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from .calls import DEFAULT_LANE, Call, Calls, Check, InEnvironment, Placing
from .client import LeanQFuture
from .config import Settings
from .drivers import Driver
from .drivers.echo import EchoDriver
from .drivers.environment import open_environment
from .drivers.lean import LeanDriver, machine_cache
from .errors import (
    ClosedError,
    RequestError,
    UnknownEnvironmentError,
    UnknownStateError,
    UsageError,
)
from .recipes import read_recipe
from .states import MemoryStates
from .stream import Maps
from .wire import Reply, unpack_request

_T = TypeVar("_T")


class Pool(Maps):
    """Checks and steps on this machine, with the methods of :class:`leanq.LeanQClient`.

    Whoever waits goes by priority, and then in the order of the calls. There is one caller, so a
    ``tenant`` means nothing here; a ``rid`` is only a name.

    Args:
        environments: a Lake project, or a folder of compiled modules, for each environment's name;
            unless given, ``default`` is the toolchain's own library.
        lean: the lean program, found as a worker finds it unless given.
        slots: Lean processes at a time; the CPUs unless given.
        nice: niceness of the Lean processes.

    Raises:
        WorkerError: no usable Lean, or an environment that cannot be read.
    """

    def __init__(
        self,
        environments: Mapping[str, Path] | None = None,
        *,
        lean: str | None = None,
        slots: int | None = None,
        nice: int = 0,
    ) -> None:
        # Only what bounds the disk's share is of meaning without a queue.
        settings = Settings.load("unix:///-", os.environ)
        slots = len(os.sched_getaffinity(0)) if slots is None else slots
        if slots < 1:
            raise UsageError(f"a pool of {slots} slots runs nothing; give at least 1")
        cache = machine_cache(settings)

        def driver(name: str, path: Path | None) -> Driver:
            return LeanDriver(
                lambda: open_environment(name, path, lean=lean),
                slots=slots,
                cache=cache,
                nice=nice,
            )

        named: Mapping[str, Path | None] = environments or {DEFAULT_LANE: None}
        drivers = [driver(*each) for each in named.items()]
        self._drivers = {driver.lane: driver for driver in (*drivers, EchoDriver())}
        self._calls = Calls(settings, "pool")
        self._states = MemoryStates()
        self._name = f"pool-{os.getpid()}-{secrets.token_hex(4)}"
        self._gate = _Gate(slots)
        self._tasks: set[asyncio.Task[None]] = set()
        # What is asked while the pool closes is either ended by that or refused.
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="leanq-pool", daemon=True
        )
        self._thread.start()
        try:
            self._wait_for(self._open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and the pool's thread; futures that are left end with ClosedError.

        Raises:
            UsageError: called by a callback of one of its own futures.
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a pool cannot be closed in a callback of its own futures")
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._wait_for(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def check(self, code: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """Lean's verdict on ``code``; as :meth:`leanq.LeanQClient.check`."""
        return self._start(self._calls.check(code, options))

    def step(self, state: str, tactic: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """What becomes of ``state`` by ``tactic``; as :meth:`leanq.LeanQClient.step`."""
        return self._start(self._calls.step(state, tactic, options))

    def export(self, state: str, **options: Unpack[InEnvironment]) -> LeanQFuture[bytes]:
        """Bytes that mean the same state anywhere; as :meth:`leanq.LeanQClient.export`."""
        return self._start(self._calls.export(state, options))

    def import_(self, exported: bytes, **options: Unpack[InEnvironment]) -> LeanQFuture[str]:
        """The state that was exported; as :meth:`leanq.LeanQClient.import_`."""
        return self._start(self._calls.import_(exported, options))

    def echo(
        self, payload: bytes, delay_s: float = 0.0, **placing: Unpack[Placing]
    ) -> LeanQFuture[bytes]:
        """The same bytes after ``delay_s`` seconds; as :meth:`leanq.LeanQClient.echo`."""
        return self._start(self._calls.echo(payload, delay_s, placing))

    def _start(self, call: Call[_T]) -> LeanQFuture[_T]:
        future: LeanQFuture[_T] = LeanQFuture(call.submission.rid)
        with self._lock:
            if self._closed:
                raise ClosedError("the pool is closed")
            self._loop.call_soon_threadsafe(self._spawn, call, future)
        return future

    def _spawn(self, call: Call[_T], future: LeanQFuture[_T]) -> None:
        task = self._loop.create_task(self._serve(call, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def withdraw(_: Future[_T]) -> None:
            if future.cancelled() and not self._closed:
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(withdraw)

    async def _serve(self, call: Call[_T], future: LeanQFuture[_T]) -> None:
        try:
            result = call.read(await self._answer(call))
        except asyncio.CancelledError:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the pool was closed before the request ended"))
            return
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    async def _answer(self, call: Call[Any]) -> Reply:
        submission = call.submission
        driver = self._driver(submission.lane or await self._lane_of(call.state))
        came_s = time.monotonic()
        deadline_s = submission.deadline_ms / 1000 or None
        try:
            async with asyncio.timeout(deadline_s):
                await self._gate.enter(submission.level)
        except TimeoutError:
            return Reply("expired", rid=submission.rid, worker=self._name)
        try:
            queued_s = time.monotonic() - came_s
            reply = await driver.run(unpack_request(submission.body))
        finally:
            self._gate.leave()
            await self._states.collect()
        if reply.error is not None:
            raise RequestError(reply.error)
        return replace(reply, rid=submission.rid, worker=self._name, attempts=1, queued_s=queued_s)

    def _driver(self, lane: str) -> Driver:
        driver = self._drivers.get(lane)
        if driver is None:
            known = ", ".join(self._drivers)
            raise UnknownEnvironmentError(f"there is no environment {lane!r}; known: {known}")
        return driver

    async def _lane_of(self, state: str) -> str:
        records = await self._states.recall(state)
        if records is None:
            raise UnknownStateError(f"the state {state} is not known here")
        fingerprint = read_recipe(state, records).source.fingerprint
        for lane, driver in self._drivers.items():
            if driver.about.get("fingerprint") == fingerprint:
                return lane
        raise UnknownStateError(f"the state {state} is of an environment that is not offered here")

    async def _open(self) -> None:
        for driver in self._drivers.values():
            await driver.open(self._states)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Gate:
    """Lets so many in at a time: by level, and then in the order in which they came."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._count = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def enter(self, level: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (level, next(self._count), turn))
        self._call()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self._free += 1
        self._call()

    def _call(self) -> None:
        while self._free > 0 and self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)
