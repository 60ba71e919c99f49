"""The bridge from threads to the dispatcher: a thread whose event loop runs it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .dispatch import Dispatcher
from .errors import LeanQError
from .transitions import Submission
from .wire import Reply

_T = TypeVar("_T")


class Engine:
    """Runs one dispatcher in a thread of its own; belongs to the process that made it.

    Raises:
        UnavailableError: no server answers.
    """

    def __init__(self, make: Callable[[], Dispatcher]) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Calls cross to the loop's thread in batches: waking it costs more than a call.
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="leanq-client", daemon=True)
        self._thread.start()
        try:
            self._dispatcher = asyncio.run_coroutine_threadsafe(_open(make), self._loop).result()
        except BaseException:
            self._end()
            raise

    def usable(self) -> bool:
        """False in a forked child, where only the thread that forked goes on."""
        return self.pid == os.getpid()

    def start(
        self,
        future: Future[_T],
        rid: str,
        submission: Submission | None,
        read: Callable[[Reply], _T],
    ) -> None:
        """Submits, or attaches to ``rid`` where there is no submission; ends ``future`` with
        what ``read`` makes of the reply. Cancelling the future withdraws the request."""

        def done(end: Reply | LeanQError) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if isinstance(end, LeanQError):
                    raise end
                future.set_result(read(end))
            except LeanQError as error:
                future.set_exception(error)

        def withdraw(ended: Future[_T]) -> None:
            if ended.cancelled():
                self._call(lambda: self._dispatcher.cancel(rid))

        future.add_done_callback(withdraw)
        if submission is None:
            self._call(lambda: self._dispatcher.attach(rid, done))
        else:
            self._call(lambda: self._dispatcher.send(submission, done))

    def stop(self, withdraw: bool) -> None:
        """Ends the dispatcher and the thread."""
        asyncio.run_coroutine_threadsafe(self._close(withdraw), self._loop).result()
        self._end()

    def _call(self, call: Callable[[], None]) -> None:
        first = not self._calls
        self._calls.append(call)
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        while self._calls:
            self._calls.popleft()()

    async def _close(self, withdraw: bool) -> None:
        self._drain()
        await self._dispatcher.close(withdraw=withdraw)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _open(make: Callable[[], Dispatcher]) -> Dispatcher:
    dispatcher = make()
    try:
        await dispatcher.open()
    except BaseException:
        await dispatcher.close(withdraw=False)
        raise
    return dispatcher
