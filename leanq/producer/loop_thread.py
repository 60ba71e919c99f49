"""A thread with an event loop, for objects that are used from any thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class LoopThread:
    """Runs an event loop in a thread of its own; belongs to the process that made it.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Calls cross to the loop's thread in batches: waking it costs more than a call. The lock
        # guards the three fields below it. It is reentrant: the garbage collector may end a
        # client's iterator, and so call while this thread holds it.
        self._lock = threading.RLock()
        self._calls: list[Callable[[], None]] = []
        self._woken = False
        self._refuses = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Returns False in a forked child, which has only the thread that forked."""
        return self._pid == os.getpid()

    @property
    def is_current(self) -> bool:
        """Returns whether the caller runs in this thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], None]) -> bool:
        """Makes the thread call ``function``; returns False if it takes no more calls."""
        if not self.is_here:
            return False
        with self._lock:
            if self._refuses:
                return False
            self._calls.append(function)
            if not self._woken:
                self._loop.call_soon_threadsafe(self._drain)
                self._woken = True
        return True

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs ``work`` in the thread's loop, and waits in the calling thread for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Refuses new calls, makes those already taken, runs ``last``, and ends the thread."""
        try:
            self.run(self._finish(last))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _finish(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        with self._lock:
            self._refuses = True
        self._drain()
        if last:
            await last()

    def _drain(self) -> None:
        with self._lock:
            calls, self._calls, self._woken = self._calls, [], False
        for call in calls:
            call()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
