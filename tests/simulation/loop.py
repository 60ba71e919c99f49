# asyncio has no public way to replace the heart of a loop.
# ruff: noqa: SLF001
"""An event loop in simulated time: it never waits, and what runs next depends on nothing but what
ran before. The processes of a simulation are hosts; each can be frozen, and killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from functools import cache
from importlib import metadata
from typing import Any
from unittest import mock

# What the clocks say when a simulation begins: seconds since 1970, and of the monotonic clock.
EPOCH_S, BEGINNING_S = 1_700_000_000.0, 1000.0

_HOST: ContextVar[Host | None] = ContextVar("host", default=None)


class Host:
    """A process with a name, all whose tasks and callbacks run in a context that names it."""

    def __init__(self, name: str, loop: SimulatedLoop) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        # What was to run meanwhile.
        self.postponed: list[asyncio.Handle] = []
        self._loop = loop
        self.context: Context = copy_context()
        self.context.run(_HOST.set, self)
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs ``work`` as this process."""
        task = self._loop.create_task(work, context=self.context)
        self.tasks.append(task)
        return task

    def freeze(self) -> None:
        """From now on nothing runs here, as after SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """It goes on, with what fell due in the meantime."""
        self.frozen = False
        postponed, self.postponed = self.postponed, []
        self._loop.resume(postponed)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs what is ready, and then sets the clock to when something next is.

    Attributes:
        faults: what failed and no task took notice of.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = BEGINNING_S
        self._outside = Context()
        self._cancelled_timers = 0
        self.faults: list[str] = []
        self.set_exception_handler(self._failed)
        # Set by the network: what a connection is made by.
        self.connect: Callable[..., Any] | None = None

    def time(self) -> float:
        return self._now_s

    def outside(self, at_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Calls at this time, as none of the hosts, whichever of them runs now."""
        return self.call_at(at_s, call, *args, context=self._outside)

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        assert self.connect
        return await self.connect(_HOST.get(), protocol_factory)

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Runs these next."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _failed(self, _: object, context: dict[str, Any]) -> None:
        # Without an exception it speaks of what the dead have left open.
        if fault := context.get("exception"):
            self.faults.append(f"{context.get('message')}: {fault!r}")

    def _process_events(self, _: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        # In place of asyncio's, which asks a selector for how long to sleep.
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise RuntimeError("nothing will ever happen any more")
            self._now_s = max(self._now_s, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            host = handle._context.get(_HOST)
            if host is not None and host.frozen:
                host.postponed.append(handle)
            else:
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # Nearly all timeouts are cancelled, long before they would be reached.
        self._cancelled_timers += 1
        scheduled = self._scheduled  # type: ignore[attr-defined]
        if 2 * self._cancelled_timers > len(scheduled) > 64:
            left = [each for each in scheduled if not each._cancelled]
            heapq.heapify(left)
            scheduled[:] = left
            self._cancelled_timers = 0

    def close(self) -> None:
        # There is neither an executor nor a selector to close.
        self._closed = True
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]


def _host_name() -> str:
    host = _HOST.get()
    return host.name if host else "nowhere"


@contextlib.contextmanager
def simulated(seed: int) -> Iterator[SimulatedLoop]:
    """A loop in whose time all clocks are, and by whose seed all chance is."""
    loop = SimulatedLoop()
    chance = random.Random(f"chance {seed}")
    seeded = type(
        "Random", (random.Random,), {"__init__": lambda s, x=None: s.seed(x or chance.random())}
    )
    state = random.getstate()
    random.seed(chance.random())
    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (time, "monotonic", loop.time),
            (time, "time", lambda: EPOCH_S + loop.time() - BEGINNING_S),
            (random, "Random", seeded),
            (secrets, "token_bytes", lambda n=32: chance.randbytes(n)),
            (socket, "gethostname", _host_name),
            (os, "getpid", lambda: 1),
            # redis-py asks for its own with each connection, and it is read from a file.
            (metadata, "version", cache(metadata.version)),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        try:
            yield loop
        finally:
            random.setstate(state)
            loop.close()
