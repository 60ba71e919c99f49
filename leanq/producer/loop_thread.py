"""The bridge from threads to the shard_client: a thread whose event loop runs it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from leanq.errors import ClosedError, LeanQError
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.shard_router import Route
from leanq.queue.requests import Reply

_T = TypeVar("_T")


class _Sent(Generic[_T]):
    """A future, and the request that it stands for: one object rather than a function for whatever
    can happen, since there may be a million of them."""

    __slots__ = ("_call", "_future", "_loop_thread", "_read", "_request_id")

    def __init__(
        self,
        loop_thread: LoopThread,
        future: Future[_T],
        request_id: str,
        call: PreparedRequest[_T] | None,
        read: Callable[[Reply], _T],
    ) -> None:
        self._loop_thread = loop_thread
        self._future = future
        self._request_id = request_id
        self._call = call
        self._read = read

    def send(self) -> None:
        """In the loop_thread's thread, as the next two."""
        call, self._call = self._call, None
        if call is None:
            self._loop_thread.shard_router.attach(self._request_id, self._done)
        else:
            self._loop_thread.shard_router.send(call, self._done)

    def _done(self, end: Reply | LeanQError) -> None:
        future = self._future
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(end, LeanQError):
            future.set_exception(end)
            return
        try:
            result = self._read(end)
        except LeanQError as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _withdraw(self) -> None:
        if self._loop_thread.shard_router.cancel(self._request_id, self._done):
            # Only now do ``concurrent.futures.wait`` and its like take it for ended.
            self._future.set_running_or_notify_cancel()

    def ended(self, _: Future[_T]) -> None:
        """In any thread."""
        if self._future.cancelled():
            self._loop_thread.call(self._withdraw)


class LoopThread:
    """Runs a client's shard_clients in a thread of its own; belongs to the process that made it.

    Raises:
        UnavailableError: no server answers.
    """

    def __init__(self, make: Callable[[], Route]) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Calls cross to the loop's thread in batches: waking it costs more than a call.
        # The lock guards the three fields below it; a collection of garbage may end an iterator of
        # the client's, and so call while the same thread holds it.
        self._lock = threading.RLock()
        self._calls: list[Callable[[], None]] = []
        self._woken = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="leanq-client", daemon=True)
        self._thread.start()
        try:
            self.shard_router = asyncio.run_coroutine_threadsafe(_open(make), self._loop).result()
        except BaseException:
            self._end()
            raise

    def usable(self) -> bool:
        """False in a forked child, where only the thread that forked goes on."""
        return self.pid == os.getpid()

    def is_current_thread(self) -> bool:
        """Whether the caller runs in the loop_thread's thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def start(
        self,
        future: Future[_T],
        request_id: str,
        call: PreparedRequest[_T] | None,
        read: Callable[[Reply], _T],
    ) -> None:
        """Sends the call, or attaches to ``request_id`` where there is none; ends ``future`` with
        what ``read`` makes of the reply. Cancelling the future withdraws the request.

        Raises:
            ClosedError: the loop_thread was stopped meanwhile.
        """

        sent = _Sent(self, future, request_id, call, read)
        future.add_done_callback(sent.ended)
        if not self.call(sent.send):
            raise ClosedError("the client is closed")

    def stop(self, withdraw: bool) -> None:
        """Ends the shard_clients and the thread."""
        try:
            asyncio.run_coroutine_threadsafe(self._close(withdraw), self._loop).result()
        finally:
            self._end()

    def call(self, call: Callable[[], None]) -> bool:
        """Makes the thread call it; False where there is no such thread any more."""
        if not self.usable():
            return False
        with self._lock:
            if self._over:
                return False
            self._calls.append(call)
            if not self._woken:
                self._loop.call_soon_threadsafe(self._drain)
                self._woken = True
        return True

    def _drain(self) -> None:
        with self._lock:
            calls, self._calls, self._woken = self._calls, [], False
        for call in calls:
            call()

    async def _close(self, withdraw: bool) -> None:
        with self._lock:
            self._over = True
        self._drain()
        await self.shard_router.close(withdraw=withdraw)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _open(make: Callable[[], Route]) -> Route:
    shard_router = make()
    await shard_router.open()
    return shard_router
