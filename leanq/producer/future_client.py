"""Operations that return futures at once, for ``leanq.LeanQClient`` and ``leanq.Pool``.

A ``LoopThread``, which runs an event loop, has the route that carries the requests.
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
    Coroutine,
    Generator,
    Iterable,
)
from concurrent.futures import Future
from typing import Any, Generic, Self, TypeVar, Unpack

from msgspec import Struct

from leanq.errors import ClosedError, LeanQError, UsageError
from leanq.producer.request_builder import (
    DEFAULT_ENVIRONMENT,
    Check,
    InEnvironment,
    PreparedRequest,
    RequestBuilder,
    SubmitOptions,
)
from leanq.producer.route import Route
from leanq.producer.stream import WINDOW, ReplyOrError, Result, Send, astream, stream
from leanq.queue.requests import Reply

_T = TypeVar("_T")


class LoopThread:
    """Runs an event loop in a thread of its own; belongs to the process that made it."""

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


class LeanQFuture(Future[_T]):
    """A ``concurrent.futures.Future``; ``request_id`` names the request in the queue.

    ``cancel()`` also withdraws the request, and stops it if it already runs. ``running()`` is True
    from the queue's acknowledgement until the request ends. Unlike other futures, a running one can
    still be cancelled.

    A callback of a future runs in the client's own thread, and must not wait there for another of
    the client's futures. ``result()`` and ``exception()`` of one that has not ended raise
    UsageError. ``concurrent.futures.wait`` and ``as_completed`` cannot tell, and wait for ever.
    """

    def __init__(self, request_id: str) -> None:
        self._thread: LoopThread | None = None
        super().__init__()
        self.request_id = request_id
        self._acknowledged = False

    def running(self) -> bool:
        """Returns whether the queue has acknowledged the request and it has not ended."""
        return self._acknowledged and not self.done()

    def result(self, timeout: float | None = None) -> _T:
        """Waits up to ``timeout`` seconds for the request's result, and returns it.

        Raises:
            UsageError: called in a callback of one of the same client's futures, or in a forked
                child of the process that made it.
            TimeoutError: it has not ended in time.
            CancelledError: it was cancelled.
            LeanQError: the error that the request ended with.
        """
        self._check_may_wait("result()")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the request's error, if it ended with one; waits and raises as ``result``."""
        self._check_may_wait("exception()")
        return super().exception(timeout)

    def _check_may_wait(self, what: str) -> None:
        if self._thread and not self._thread.is_here and not self.done():
            raise UsageError(
                f"{what} of a future of the parent process, which had not ended before the fork, "
                "would wait for ever: only the parent hears of its end; send the request here"
            )
        if self._thread and self._thread.is_current and not self.done():
            raise UsageError(
                f"{what} of a future that has not ended, in a callback of one of the same "
                "client's futures, would wait for ever; add a callback to that future instead"
            )


class _FutureWaiter(Struct, Generic[_T], eq=False):
    """The waiter of a future.

    It is one object and not several closures, since there may be a million of them.
    """

    _thread: LoopThread
    _route: Route
    _future: LeanQFuture[_T]
    _prepared: PreparedRequest[_T] | None
    _read: Callable[[Reply], _T]

    def send(self) -> None:
        """Sends the request; like the next three methods, it is called in the client's thread."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            self._route.attach(self._future.request_id, self)
        else:
            self._route.send(prepared, self)

    def acknowledged(self) -> None:
        self._future._acknowledged = True

    def ended(self, end: Reply | LeanQError) -> None:
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
        if self._route.cancel(self._future.request_id, self):
            # Only now does ``concurrent.futures.wait`` take it for ended.
            self._future.set_running_or_notify_cancel()

    def note_done(self, _: Future[_T]) -> None:
        """Withdraws the request if its future was cancelled; may be called in any thread."""
        if self._future.cancelled():
            self._thread.call(self._withdraw)


class FutureClient:
    """Offers operations as futures, on a route that runs in a thread of the client's own.

    After ``os.fork()`` the child goes on with a thread and a route of its own, and so does a copy
    by pickle, at its first use.

    ``new_route`` is called in the thread's event loop. ``kind``: what users call it, for messages.
    """

    def __init__(
        self, builder: RequestBuilder, new_route: Callable[[], Route], *, kind: str
    ) -> None:
        self._builder = builder
        self._new_route = new_route
        self._kind = kind
        self._lock = threading.Lock()
        self._closed = False
        self._begun: tuple[LoopThread, Route] | None = self._begin()
        _clients.add(self)

    def _begin(self) -> tuple[LoopThread, Route]:
        async def open_route() -> Route:
            route = self._new_route()
            await route.open()
            return route

        thread = LoopThread(f"leanq-{self._kind}")
        try:
            return thread, thread.run(open_route())
        except BaseException:
            thread.stop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_begun": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, withdraw: bool = True) -> None:
        """Ends the client and its thread.

        Outstanding futures end with ClosedError. Their requests are withdrawn, or with
        ``withdraw=False`` run on if there is a queue.

        Raises:
            UsageError: called by a callback of one of its own futures.
        """
        self._check_may_wait("close()")
        with self._lock:
            begun, self._begun, self._closed = self._begun, None, True
        if begun and begun[0].is_here:
            thread, route = begun
            thread.stop(lambda: route.close(withdraw=withdraw))

    def check(self, code: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """Checks ``code`` with Lean, and returns a future of a ``Reply``.

        If code is incomplete, each ``sorry`` comes back with its goal and a state.

        Examples:
            >>> reply = lean.check("theorem t (p q : Prop) (h : p) : q := h", timeout_s=10).result()
            >>> reply.verdict, reply.reason, reply.messages[0].line
            ('rejected', 'lean_error', 1)

        Args:
            code: Lean source, header included.
            options: those of ``Check``, ``InEnvironment`` and ``SubmitOptions``.

        Raises:
            UsageError: a malformed argument; nothing is sent. The future itself may end with
                QueueFullError, UnknownEnvironmentError, NoWorkerError, RequestError,
                UnavailableError or ClosedError.
        """
        return self._start(self._builder.check(code, options))

    def verify(
        self,
        target: str | None,
        code: str,
        *,
        theorems: Iterable[str] = (),
        holes: Iterable[str] = (),
        **options: Unpack[Check],
    ) -> LeanQFuture[Reply]:
        """Judges whether ``code`` proves a target, and returns a future of a ``Reply``.

        ``accepted`` means that the candidate proves all theorems of the target, by the same
        statements. Otherwise the reply's ``failed`` says which theorem failed by which rule.

        Examples:
            >>> target = "theorem t (p : Prop) (h : p) : p := sorry"
            >>> lean.verify(target, "theorem t (p : Prop) (h : p) : p := h").result().verdict
            'accepted'
            >>> code = "theorem t (p : Prop) (h : p) : p ∨ p := .inl h"
            >>> other = lean.verify(target, code).result()
            >>> other.verdict, [(failure.name, failure.rule) for failure in other.failed]
            ('rejected', [('t', 'type_differs')])

        Args:
            target: Lean source whose proofs are ``sorry``; ``None`` if ``theorems`` are given.
            code: the candidate: Lean source, header included.
            theorems: instead of a target, names of statements in the environment.
            holes: names in the target whose values the candidate may choose.
            options: as of ``check``.

        Raises:
            UsageError: as of ``check``, or both or none of a target and theorems.
        """
        return self._start(self._builder.verify(target, code, theorems, holes, options))

    def step(self, state: str, tactic: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """Runs ``tactic`` on ``state``, and returns a future of a ``Reply``.

        The verdict is ``accepted`` when nothing is left to prove. ``incomplete`` comes with the
        next state and its goals, ``rejected`` with Lean's messages, whose places are in the tactic.
        Only this state's hole is judged: other ``sorry``s of its source stay as they are.

        Examples:
            >>> code = "theorem t (p q : Prop) (h : p) (g : q) : p ∧ q := by sorry"
            >>> [hole] = lean.check(code).result().sorries
            >>> step = lean.step(hole.state, "constructor").result()
            >>> step.verdict, len(step.goals)
            ('incomplete', 2)
            >>> lean.step(step.state, "exact h\\nexact g").result().verdict
            'accepted'

        Args:
            state: a state's id, from a reply.
            tactic: one or several tactics, as they would stand after ``by``.
            options: as of ``check``.

        Raises:
            UsageError: as of ``check``. The future may also end with UnknownStateError.
        """
        return self._start(self._builder.step(state, tactic, options))

    def export(self, state: str, **options: Unpack[InEnvironment]) -> LeanQFuture[bytes]:
        """Exports ``state`` as bytes that mean the same in any equal environment."""
        return self._start(self._builder.export(state, options))

    def import_(self, exported: bytes, **options: Unpack[InEnvironment]) -> LeanQFuture[str]:
        """Imports an exported state, and returns a future of its id here.

        Examples:
            >>> [hole] = lean.check("theorem t (p : Prop) (h : p) : p := by sorry").result().sorries
            >>> exported = lean.export(hole.state).result()
            >>> lean.import_(exported).result() == hole.state
            True

        Raises:
            RecipeError: the bytes are damaged, or no exported state.
        """
        return self._start(self._builder.import_(exported, options))

    def echo(
        self, payload: bytes, delay_s: float = 0.0, **options: Unpack[SubmitOptions]
    ) -> LeanQFuture[bytes]:
        """Returns the same bytes from a worker with the echo driver, after ``delay_s`` seconds."""
        return self._start(self._builder.echo(payload, delay_s, options))

    def map(
        self,
        codes: Iterable[str],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        **options: Unpack[Check],
    ) -> Generator[Result, None, None]:
        """Checks any number of codes with Lean, and yields a ``Result`` for each.

        The thread that iterates reads the codes as they are needed. If a code or its request is
        faulty, its result has the ``error``.

        When the iterator ends, it withdraws outstanding requests. ``close()`` and an exception from
        the codes end it at once. A loop that is left early, as by ``break``, ends it when Python
        collects the iterator. That is mostly at once, but a traceback can delay it;
        ``contextlib.closing`` ends the iterator without delay.

        An iterator belongs to one thread at a time; a client may have many iterators. If most codes
        import a module that the environment lacks, or lack a judge that works, the log
        ``leanq.client`` warns of it once.

        Examples:
            >>> codes = ["theorem t (p : Prop) (h : p) : p := h", "theorem u : 1 = 2 := rfl", ""]
            >>> for result in lean.map(codes):
            ...     print(result.index, result.verdict, result.error)
            0 accepted None
            1 rejected None
            2 None there is no Lean code to check: the text is empty

        Args:
            codes: Lean sources, from an iterable that may be endless.
            window: how many codes to read at most beyond those whose results were given out. All of
                them may be outstanding, so let it be several times the fleet's slots.
            ordered: whether results come in the order of the codes rather than as they finish. In
                order, a late one holds up at most ``window`` others.
            options: as of ``check``, the same for all codes; ``request_id`` is not allowed.

        Raises:
            UsageError: a malformed option, at once.
            ClosedError: the client is closed while codes are left to send.
        """
        self._check_may_wait("map()")
        return stream(*self._sender(options), codes, window, ordered)

    def amap(
        self,
        codes: Iterable[str] | AsyncIterable[str],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        **options: Unpack[Check],
    ) -> AsyncGenerator[Result, None]:
        """Does the same as ``map``, for ``async for`` in any event loop.

        A task in the loop that iterates reads the codes, also while a result is awaited or in use.
        If that ``async for`` is left early, outstanding requests are withdrawn once the loop
        collects the iterator. ``contextlib.aclosing`` withdraws them before going on.

        Examples:
            >>> async def verdicts(codes):
            ...     return [result.verdict async for result in lean.amap(codes)]
            >>> asyncio.run(verdicts(["theorem t (p : Prop) (h : p) : p := h"]))
            ['accepted']
        """
        return astream(*self._sender(options), codes, window, ordered)

    def _sender(self, options: Check) -> tuple[Send, str]:
        shared = self._builder.shared(options)
        make = self._builder.checks(shared)

        def send(code: str, done: Callable[[ReplyOrError], None]) -> Callable[[], object]:
            def ended(future: Future[Reply]) -> None:
                # Only withdrawn requests are cancelled.
                if not future.cancelled():
                    done(future.exception() or future.result())

            future = self._start(make(code))
            future.add_done_callback(ended)
            return future.cancel

        return send, shared.get("env", DEFAULT_ENVIRONMENT)

    def _start(self, prepared: PreparedRequest[_T]) -> LeanQFuture[_T]:
        future: LeanQFuture[_T] = LeanQFuture(prepared.submission.request_id)
        self._send(future, prepared, prepared.read)
        return future

    def _send(
        self,
        future: LeanQFuture[_T],
        prepared: PreparedRequest[_T] | None,
        read: Callable[[Reply], _T],
    ) -> None:
        """Sends ``prepared``, or attaches if None; ``read`` turns the reply into the result."""
        thread, route = self._running()
        sent = _FutureWaiter(thread, route, future, prepared, read)
        future._thread = thread
        future.add_done_callback(sent.note_done)
        if not thread.call(sent.send):
            raise ClosedError(f"the {self._kind} is closed")

    def _running(self) -> tuple[LoopThread, Route]:
        begun = self._begun
        if begun and begun[0].is_here:
            return begun
        with self._lock:
            if self._closed:
                raise ClosedError(f"the {self._kind} is closed")
            if not (self._begun and self._begun[0].is_here):
                self._begun = self._begin()
            return self._begun

    def _check_may_wait(self, what: str) -> None:
        begun = self._begun
        if begun and begun[0].is_current:
            raise UsageError(
                f"{what} of a {self._kind} in a callback of one of its own futures would wait "
                "for ever; call it in another thread"
            )


_clients: weakref.WeakSet[FutureClient] = weakref.WeakSet()


def _renew_locks() -> None:
    # The parent may have forked while another of its threads held a lock.
    for client in _clients:
        client._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
