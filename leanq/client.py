"""Clients: ``LeanQClient`` for threads and scripts, ``AsyncLeanQClient`` for asyncio.

Both send requests in batches, hold at most two connections, and wait for any number of
replies with one blocking read. Both survive a restart of Redis while they wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from functools import partial
from typing import Self, TypeVar, Unpack

from leanq.errors import ClosedError, LeanQError, UsageError
from leanq.producer.cluster_router import Clusters, SeveralClusters
from leanq.producer.loop_thread import LoopThread
from leanq.producer.request_builder import (
    Check,
    InEnvironment,
    Placing,
    PreparedRequest,
    RequestBuilder,
)
from leanq.producer.shard_client import Done, ShardClient, WhenFull
from leanq.producer.shard_router import Route, ShardRouter, StateLocator
from leanq.producer.stream import WINDOW, End, Maps, Result, astream
from leanq.queue.queue import Queue
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings

_T = TypeVar("_T")


class _Client:
    """What both clients share.

    Args:
        url: the Redis, or :class:`Settings` with further choices; or several, each a cluster of
            its own, also as one text, ``redis://A*3 redis://B*1``. A request goes to one of them.
        weights: how much of what is new goes to each of several, in proportion; 0 is nothing.
            Equal unless given.
        tenant: who shares fairly, unless a call says otherwise.
        when_full: whether a submit that meets a full queue waits or raises QueueFullError.
        unavailable_timeout_s: how long the server may be out of reach, in seconds, before
        outstanding
            requests end with UnavailableError.
    """

    def __init__(
        self,
        url: str | Settings | Sequence[str | Settings],
        *,
        weights: Sequence[float] | None = None,
        tenant: str = "default",
        when_full: WhenFull = "wait",
        unavailable_timeout_s: float = 120.0,
    ) -> None:
        self._clusters = Clusters.load(url, weights, os.environ)
        # What is said of requests alone is the same for all clusters.
        self.settings = self._clusters.each[0]
        self._calls = RequestBuilder(self.settings, tenant)
        self._when_full: WhenFull = when_full
        self._unavailable_timeout_s = unavailable_timeout_s

    @property
    def clusters(self) -> Sequence[Settings]:
        """Each of its clusters, mostly one."""
        return self._clusters.each

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Moves what is new between clusters, from now on: weights by URL, others keep theirs.

        What is in flight finishes where it is. A step goes to its state, whatever the weight there.

        Raises:
            UsageError: a URL that the client was not given, a weight below 0, or nothing but 0.
        """
        self._clusters.change(weights)

    def _shard_router(self) -> Route:
        when_full, unavailable_timeout_s = self._when_full, self._unavailable_timeout_s
        if len(self._clusters.each) > 1:
            return SeveralClusters(
                self._clusters, when_full=when_full, unavailable_timeout_s=unavailable_timeout_s
            )
        queues = Queue.each(self.settings)
        shard_clients = [
            ShardClient(queue, when_full=when_full, unavailable_timeout_s=unavailable_timeout_s)
            for queue in queues
        ]
        return ShardRouter(shard_clients, StateLocator(queues, unavailable_timeout_s))


class AsyncLeanQClient(_Client):
    """The asyncio client: an async context manager, for one event loop.

    Cancelling a task that waits for a reply withdraws its request.
    """

    _loop_thread: Route | None = None

    async def __aenter__(self) -> Self:
        loop_thread = self._shard_router()
        await loop_thread.open()
        self._loop_thread = loop_thread
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, *, withdraw: bool = True) -> None:
        """Ends the client. What is outstanding is withdrawn from the queue, or runs on."""
        loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread:
            await loop_thread.close(withdraw=withdraw)

    async def check(self, code: str, **options: Unpack[Check]) -> Reply:
        """Lean's verdict on ``code``; arguments and errors as :meth:`LeanQClient.check`."""
        return await self._reply(self._calls.check(code, options))

    def amap(
        self,
        codes: Iterable[str] | AsyncIterable[str],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        **options: Unpack[Check],
    ) -> AsyncGenerator[Result, None]:
        """Lean's verdicts on any number of codes; as :meth:`LeanQClient.amap`."""
        shared = self._calls.shared(options)

        def send(code: str, done: Callable[[End], None]) -> Callable[[], object]:
            return self._send(self._calls.check(code, shared), done)

        return astream(send, codes, window, ordered)

    async def step(self, state: str, tactic: str, **options: Unpack[Check]) -> Reply:
        """What becomes of ``state`` by ``tactic``; as :meth:`LeanQClient.step`."""
        return await self._reply(self._calls.step(state, tactic, options))

    async def export(self, state: str, **options: Unpack[InEnvironment]) -> bytes:
        """Bytes that mean the same state anywhere; as :meth:`LeanQClient.export`."""
        return await self._reply(self._calls.export(state, options))

    async def import_(self, exported: bytes, **options: Unpack[InEnvironment]) -> str:
        """The state that was exported; as :meth:`LeanQClient.import_`."""
        return await self._reply(self._calls.import_(exported, options))

    async def echo(self, payload: bytes, delay_s: float = 0.0, **placing: Unpack[Placing]) -> bytes:
        """The same bytes, from a worker with the echo driver, after ``delay_s`` seconds."""
        return await self._reply(self._calls.echo(payload, delay_s, placing))

    async def attach(self, request_id: str) -> Reply:
        """The reply to a request submitted before; raises LostError where none is known."""
        request_id = self._calls.request_id(request_id)
        return await self._end(
            request_id, lambda loop_thread, done: loop_thread.attach(request_id, done)
        )

    def _send(
        self, call: PreparedRequest[Reply], done: Callable[[End], None]
    ) -> Callable[[], object]:
        loop_thread = self._open_loop_thread()

        def ended(end: Reply | LeanQError) -> None:
            done(call.read(end) if isinstance(end, Reply) else end)

        loop_thread.send(call, ended)
        return partial(loop_thread.cancel, call.submission.request_id, ended)

    async def _reply(self, call: PreparedRequest[_T]) -> _T:
        request_id = call.submission.request_id
        return call.read(
            await self._end(request_id, lambda loop_thread, done: loop_thread.send(call, done))
        )

    async def _end(self, request_id: str, begin: Callable[[Route, Done], None]) -> Reply:
        loop_thread = self._open_loop_thread()
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def done(end: Reply | LeanQError) -> None:
            if future.done():
                return
            if isinstance(end, LeanQError):
                future.set_exception(end)
            else:
                future.set_result(end)

        begin(loop_thread, done)
        try:
            return await future
        except asyncio.CancelledError:
            loop_thread.cancel(request_id, done)
            raise

    def _open_loop_thread(self) -> Route:
        if self._loop_thread is None:
            raise ClosedError("the client is not open; enter it with 'async with'")
        return self._loop_thread


class LeanQFuture(Future[_T]):
    """A ``concurrent.futures.Future``; ``request_id`` names the request in the queue.

    ``cancel()`` also withdraws the request, and stops it where it already runs.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


class LeanQClient(_Client, Maps):
    """The client for threads: its methods return futures at once.

    It may be used from any thread, inside a running event loop, and in a notebook. After
    ``os.fork()`` the child works on with connections of its own; the futures that it
    inherited belong to the parent and never end in the child.

    Raises:
        UnavailableError: no server answers at the URL, or at none of several.
    """

    def __init__(
        self,
        url: str | Settings | Sequence[str | Settings],
        *,
        weights: Sequence[float] | None = None,
        tenant: str = "default",
        when_full: WhenFull = "wait",
        unavailable_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(
            url,
            weights=weights,
            tenant=tenant,
            when_full=when_full,
            unavailable_timeout_s=unavailable_timeout_s,
        )
        self._lock = threading.Lock()
        self._closed = False
        self._loop_thread: LoopThread | None = LoopThread(self._shard_router)
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, withdraw: bool = True) -> None:
        """Ends the client and its thread. Outstanding futures end with ClosedError; their
        requests are withdrawn from the queue, or run on to be attached to later.

        Raises:
            UsageError: called by a callback of one of its own futures.
        """
        if self._loop_thread and self._loop_thread.is_current_thread():
            raise UsageError("a client cannot be closed in a callback of its own futures")
        with self._lock:
            loop_thread, self._loop_thread, self._closed = self._loop_thread, None, True
        if loop_thread and loop_thread.usable():
            loop_thread.stop(withdraw)

    def check(self, code: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """Lean's verdict on ``code``, as a future of a :class:`Reply`.

        Each ``sorry`` of code that is incomplete comes back with its goal and a state.

        Args:
            code: Lean source, header included.
            options: the fields of :class:`Check`, :class:`InEnvironment` and :class:`Placing`.

        Raises:
            UsageError: a malformed argument; nothing is sent. The future itself may end with
                QueueFullError, UnknownEnvironmentError, RequestError, UnavailableError or
                ClosedError.
        """
        return self._start(self._calls.check(code, options))

    def step(self, state: str, tactic: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """What becomes of ``state`` by ``tactic``, as a future of a :class:`Reply`.

        Its verdict is ``accepted`` when nothing is left to prove, ``incomplete`` with the next
        state and its goals, ``rejected`` with Lean's messages, whose places are in the tactic.
        Only this state's hole is judged: other ``sorry``\\ s of its source stay as they are.

        Args:
            state: a state's id, from a reply.
            tactic: one or several tactics, as they would stand after ``by``.
            options: as of :meth:`check`.

        Raises:
            UsageError: as of :meth:`check`. The future may also end with UnknownStateError.
        """
        return self._start(self._calls.step(state, tactic, options))

    def export(self, state: str, **options: Unpack[InEnvironment]) -> LeanQFuture[bytes]:
        """Bytes that mean the same state wherever there is the same environment."""
        return self._start(self._calls.export(state, options))

    def import_(self, exported: bytes, **options: Unpack[InEnvironment]) -> LeanQFuture[str]:
        """The state that was exported, now known to this queue.

        Raises:
            RecipeError: the bytes are damaged, or something else.
        """
        return self._start(self._calls.import_(exported, options))

    def echo(
        self, payload: bytes, delay_s: float = 0.0, **placing: Unpack[Placing]
    ) -> LeanQFuture[bytes]:
        """The same bytes, from a worker with the echo driver, after ``delay_s`` seconds."""
        return self._start(self._calls.echo(payload, delay_s, placing))

    def attach(self, request_ids: Iterable[str]) -> list[LeanQFuture[Reply]]:
        """Futures for requests submitted before, perhaps by a client that died.

        One for which the server knows neither request nor reply ends with LostError.
        """
        futures: list[LeanQFuture[Reply]] = [
            LeanQFuture(self._calls.request_id(request_id)) for request_id in request_ids
        ]
        loop_thread = self._running()
        for future in futures:
            loop_thread.start(future, future.request_id, None, _whole)
        return futures

    def _start(self, call: PreparedRequest[_T]) -> LeanQFuture[_T]:
        future: LeanQFuture[_T] = LeanQFuture(call.submission.request_id)
        self._running().start(future, future.request_id, call, call.read)
        return future

    def _running(self) -> LoopThread:
        loop_thread = self._loop_thread
        if loop_thread and loop_thread.usable():
            return loop_thread
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if not (self._loop_thread and self._loop_thread.usable()):
                self._loop_thread = LoopThread(self._shard_router)
            return self._loop_thread


_clients: weakref.WeakSet[LeanQClient] = weakref.WeakSet()


def _renew_locks() -> None:
    # The parent may have forked while another of its threads held a lock.
    for client in _clients:
        client._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _whole(reply: Reply) -> Reply:
    return reply
