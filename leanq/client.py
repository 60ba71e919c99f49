"""Clients: ``LeanQClient`` for threads and scripts, ``AsyncLeanQClient`` for asyncio.

Both send requests in batches, hold at most two connections, and wait for any number of
replies with one blocking read. Both survive a restart of Redis while they wait.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Self, TypedDict, Unpack

from . import wire
from .config import Settings, check_name
from .dispatch import Dispatcher, WhenFull
from .engine import Engine
from .errors import ClosedError, InvalidRequestError, LeanQError, RequestError, UsageError
from .keys import new_rid, shard_of
from .queue import Queue
from .switch import Switch
from .transitions import Submission
from .wire import Reply, Request

DEFAULT_LANE = "default"
ECHO_LANE = "echo"


class Placing(TypedDict, total=False):
    """Where a request goes in the queue.

    Attributes:
        tenant: who shares fairly with other tenants; the client's own unless given.
        priority: 0 (most urgent) to 2; 1 unless given.
        deadline_s: seconds in the queue after which the verdict is ``expired``.
        rid: a name for the request; the same name again gives the same reply.
    """

    tenant: str
    priority: int
    deadline_s: float | None
    rid: str | None


class Check(Placing, total=False):
    """How code is checked.

    Attributes:
        env: the environment to check in, as a worker offers it; ``default`` unless given.
        timeout_s: budget of CPU time in seconds (60); beyond it the verdict is ``timeout``.
        memory_mb: resident memory in MiB (4096); beyond it the verdict is ``memory``.
        allow_axioms: axioms allowed beside the environment's own.
        audit: whether what Lean accepts is audited (True).
        replay: whether the kernel replays it as well, where the toolchain can (False).
    """

    env: str
    timeout_s: float
    memory_mb: int
    allow_axioms: Iterable[str]
    audit: bool
    replay: bool


class _Client:
    """What both clients share: settings, and submissions made of a caller's arguments.

    Args:
        url: the Redis, or :class:`Settings` with further choices.
        tenant: who shares fairly, unless a call says otherwise.
        when_full: whether a submit that meets a full queue waits or raises QueueFullError.
        patience_s: how long the server may be out of reach, in seconds, before outstanding
            requests end with UnavailableError.
    """

    def __init__(
        self,
        url: str | Settings,
        *,
        tenant: str = "default",
        when_full: WhenFull = "wait",
        patience_s: float = 120.0,
    ) -> None:
        self.settings = url if isinstance(url, Settings) else Settings.load(url, os.environ)
        self.tenant = check_name("tenant", tenant)
        self._when_full: WhenFull = when_full
        self._patience_s = patience_s

    def _switch(self) -> Switch:
        dispatchers = [
            Dispatcher(queue, when_full=self._when_full, patience_s=self._patience_s)
            for queue in Queue.each(self.settings)
        ]
        return Switch(dispatchers)

    def _rid(self, rid: str) -> str:
        """``rid`` if it can be one; raises UsageError."""
        if shard_of(rid) >= self.settings.shards:
            raise InvalidRequestError(
                f"{rid!r} is of a shard that this queue does not have; it has "
                f"{self.settings.shards} (LEANQ_SHARDS)"
            )
        if not (rid.isascii() and rid.isprintable()):
            raise InvalidRequestError(f"{rid!r} has characters that no request id may have")
        return rid

    def _check(self, code: str, options: Check) -> Submission:
        _only(Check.__optional_keys__, options)
        timeout_s = options.get("timeout_s", 60.0)
        request = Request(
            op="check",
            code=code,
            timeout_s=timeout_s,
            wall_s=wire.wall_for(timeout_s),
            memory_mb=options.get("memory_mb", 4096),
            allow_axioms=tuple(sorted(set(options.get("allow_axioms", ())))),
            audit=options.get("audit", True),
            replay=options.get("replay", False),
        )
        return self._submission(request, options.get("env", DEFAULT_LANE), options)

    def _echo(self, payload: bytes, delay_s: float, placing: Placing) -> Submission:
        _only(Placing.__optional_keys__, placing)
        request = Request(op="echo", payload=payload, delay_s=delay_s)
        return self._submission(request, ECHO_LANE, placing)

    def _submission(self, request: Request, lane: str, placing: Placing) -> Submission:
        priority = placing.get("priority", 1)
        if priority not in range(wire.LEVELS):
            raise InvalidRequestError(f"priority is {priority}; 0 is most urgent, 2 least")
        deadline_s = placing.get("deadline_s")
        if deadline_s is not None and not 0 < deadline_s <= 1e9:
            raise InvalidRequestError(f"deadline is {deadline_s:g} s; it must be above 0")
        rid = placing.get("rid")
        body = wire.pack_request(request)
        # An echo is for load tests, where each request is to run.
        digest = b"" if request.op == "echo" else hashlib.blake2b(body, digest_size=16).digest()
        return Submission(
            rid=new_rid(self.settings.shards, digest) if rid is None else self._rid(rid),
            lane=check_name("environment", lane),
            tenant=check_name("tenant", placing.get("tenant", self.tenant)),
            level=int(priority),
            deadline_ms=0 if deadline_s is None else max(1, int(deadline_s * 1000)),
            longest_run_ms=int(request.longest_run_s * 1000),
            body=body,
            digest=base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        )


class AsyncLeanQClient(_Client):
    """The asyncio client: an async context manager, for one event loop.

    Cancelling a task that waits for a reply withdraws its request.
    """

    _engine: Switch | None = None

    async def __aenter__(self) -> Self:
        engine = self._switch()
        await engine.open()
        self._engine = engine
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, *, withdraw: bool = True) -> None:
        """Ends the client. What is outstanding is withdrawn from the queue, or runs on."""
        engine, self._engine = self._engine, None
        if engine:
            await engine.close(withdraw=withdraw)

    async def check(self, code: str, **options: Unpack[Check]) -> Reply:
        """Lean's verdict on ``code``; arguments and errors as :meth:`LeanQClient.check`."""
        submission = self._check(code, options)
        return await self._reply(submission.rid, submission)

    async def echo(self, payload: bytes, delay_s: float = 0.0, **placing: Unpack[Placing]) -> bytes:
        """The same bytes, from a worker with the echo driver, after ``delay_s`` seconds."""
        submission = self._echo(payload, delay_s, placing)
        return _payload(await self._reply(submission.rid, submission))

    async def attach(self, rid: str) -> Reply:
        """The reply to a request submitted before; raises LostError where none is known."""
        return await self._reply(self._rid(rid), None)

    async def _reply(self, rid: str, submission: Submission | None) -> Reply:
        engine = self._engine
        if engine is None:
            raise ClosedError("the client is not open; enter it with 'async with'")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def done(end: Reply | LeanQError) -> None:
            if future.done():
                return
            if isinstance(end, LeanQError):
                future.set_exception(end)
            else:
                future.set_result(end)

        if submission is None:
            engine.attach(rid, done)
        else:
            engine.send(submission, done)
        try:
            return await future
        except asyncio.CancelledError:
            engine.cancel(rid, done)
            raise


class LeanQFuture(Future[Reply]):
    """A ``concurrent.futures.Future`` of a reply; ``rid`` names the request in the queue.

    ``cancel()`` also withdraws the request, and stops it where it already runs.
    """

    def __init__(self, rid: str) -> None:
        super().__init__()
        self.rid = rid


class EchoFuture(Future[bytes]):
    """A future of an echo's payload; ``rid`` names the request in the queue."""

    def __init__(self, rid: str) -> None:
        super().__init__()
        self.rid = rid


class LeanQClient(_Client):
    """The client for threads: its methods return futures at once.

    It may be used from any thread, inside a running event loop, and in a notebook. After
    ``os.fork()`` the child works on with connections of its own; the futures that it
    inherited belong to the parent and never end in the child.

    Raises:
        UnavailableError: no server answers at the URL.
    """

    def __init__(
        self,
        url: str | Settings,
        *,
        tenant: str = "default",
        when_full: WhenFull = "wait",
        patience_s: float = 120.0,
    ) -> None:
        super().__init__(url, tenant=tenant, when_full=when_full, patience_s=patience_s)
        self._lock = threading.Lock()
        self._closed = False
        self._engine: Engine | None = Engine(self._switch)
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
        if self._engine and self._engine.is_current_thread():
            raise UsageError("a client cannot be closed in a callback of its own futures")
        with self._lock:
            engine, self._engine, self._closed = self._engine, None, True
        if engine and engine.usable():
            engine.stop(withdraw)

    def check(self, code: str, **options: Unpack[Check]) -> LeanQFuture:
        """Lean's verdict on ``code``, as a future of a :class:`Reply`.

        Args:
            code: Lean source, header included.
            options: the fields of :class:`Check` and :class:`Placing`.

        Raises:
            UsageError: a malformed argument; nothing is sent. The future itself may end with
                QueueFullError, UnknownEnvironmentError, RequestError, UnavailableError or
                ClosedError.
        """
        submission = self._check(code, options)
        future = LeanQFuture(submission.rid)
        self._running().start(future, submission.rid, submission, _whole)
        return future

    def echo(self, payload: bytes, delay_s: float = 0.0, **placing: Unpack[Placing]) -> EchoFuture:
        """The same bytes, from a worker with the echo driver, after ``delay_s`` seconds."""
        submission = self._echo(payload, delay_s, placing)
        future = EchoFuture(submission.rid)
        self._running().start(future, submission.rid, submission, _payload)
        return future

    def attach(self, rids: Iterable[str]) -> list[LeanQFuture]:
        """Futures for requests submitted before, perhaps by a client that died.

        One for which the server knows neither request nor reply ends with LostError.
        """
        futures = [LeanQFuture(self._rid(rid)) for rid in rids]
        engine = self._running()
        for future in futures:
            engine.start(future, future.rid, None, _whole)
        return futures

    def _running(self) -> Engine:
        engine = self._engine
        if engine and engine.usable():
            return engine
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if not (self._engine and self._engine.usable()):
                self._engine = Engine(self._switch)
            return self._engine


_clients: weakref.WeakSet[LeanQClient] = weakref.WeakSet()


def _renew_locks() -> None:
    # The parent may have forked while another of its threads held a lock.
    for client in _clients:
        client._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _only(known: frozenset[str], options: Mapping[str, object]) -> None:
    """What Python does by itself for a function without ``**options``."""
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"unexpected option {unknown[0]!r}; there are {', '.join(sorted(known))}")


def _whole(reply: Reply) -> Reply:
    return reply


def _payload(reply: Reply) -> bytes:
    if reply.payload is None:
        raise RequestError(f"the echo ended with the verdict {reply.verdict}")
    return reply.payload
