"""Many codes through one client: read as they are needed, their results as a stream.

What was read and not given out yet is a *window*, ended or not. It bounds what is outstanding and
what is kept, so memory stays flat for any number of codes.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Unpack

from leanq.errors import InvalidRequestError, LeanQError, UsageError
from leanq.producer.request_builder import Check, RequestBuilder
from leanq.queue.requests import Reply, Verdict

WINDOW = 512

# So what has ended does not stay behind a slow source, and the fleet has work meanwhile.
_GIVEN_PER_READ = 2

End = Reply | BaseException
Send = Callable[[str, Callable[[End], None]], Callable[[], object]]
"""Sends a code, and calls back once, in any thread, with its end. Returns what withdraws it, after
which nobody needs to be called."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one of many codes ended.

    Attributes:
        index: its place in the input, from 0.
        code: the code.
        reply: the reply to it, or ``None``.
        error: why there is no reply, or ``None``.
    """

    index: int
    code: str
    reply: Reply | None = None
    error: LeanQError | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The reply's verdict; ``None`` where there is no reply."""
        return self.reply.verdict if self.reply else None


class Maps:
    """``map`` and ``amap`` for whatever has ``check``."""

    _calls: RequestBuilder

    @abstractmethod
    def check(self, code: str, **options: Unpack[Check]) -> Future[Reply]:
        """Lean's verdict on ``code``, as a future."""

    def map(
        self,
        codes: Iterable[str],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        **options: Unpack[Check],
    ) -> Generator[Result, None, None]:
        """Lean's verdicts on any number of codes, each a :class:`Result`.

        Codes are read as they are needed, in the thread that iterates; what is wrong with one of
        them, or with its request, is its result's ``error``. When the iterator ends, what is
        outstanding is withdrawn: at once by ``close()`` and an exception of the codes, and where a
        loop is left early, when Python collects the iterator, which after ``break`` is at once too;
        a traceback can keep it (``contextlib.closing`` does not wait). An iterator belongs to one
        thread at a time; a client may have many of them.

        Args:
            codes: Lean sources, from an iterable that may be endless.
            window: how many codes at most are read beyond those whose results were given out. All
                of them may be outstanding, so let it be several times the fleet's slots.
            ordered: results in the order of the codes, where one that is late holds up those behind
                it, at most ``window`` of them; or else as they finish.
            options: as of :meth:`check`, for all codes alike; but no ``request_id``.

        Raises:
            UsageError: a malformed option, at once.
            ClosedError: the client is closed, and another code was to be sent.
        """
        return _results(_Window(self._sender(options), window, ordered), iter(_many(codes)))

    def amap(
        self,
        codes: Iterable[str] | AsyncIterable[str],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        **options: Unpack[Check],
    ) -> AsyncGenerator[Result, None]:
        """As :meth:`map`, for ``async for`` in any event loop.

        Codes are read by a task in the loop that iterates, also while a result is awaited or in
        use. Where that ``async for`` is left early, what is outstanding is withdrawn as soon as the
        loop collects the iterator; ``contextlib.aclosing`` does it before going on.
        """
        return astream(self._sender(options), codes, window, ordered)

    def _sender(self, options: Check) -> Send:
        shared = self._calls.shared(options)

        def send(code: str, done: Callable[[End], None]) -> Callable[[], object]:
            future = self.check(code, **shared)
            future.add_done_callback(partial(_tell, done))
            return future.cancel

        return send


def astream(
    send: Send, codes: Iterable[str] | AsyncIterable[str], window: int, ordered: bool
) -> AsyncGenerator[Result, None]:
    """The results of ``codes``, which are sent by ``send``; as :meth:`Maps.amap`."""
    source = codes if isinstance(codes, AsyncIterable) else iter(_many(codes))
    return _aresults(_Window(send, window, ordered), source)


class _Window:
    """What was read and has not been given out. Ends may arrive in any thread; the rest is for the
    one that iterates."""

    def __init__(self, send: Send, size: int, ordered: bool) -> None:
        if size < 1:
            raise InvalidRequestError(f"window is {size}; it must be at least 1")
        self.wake: Callable[[], object] = lambda: None
        self._send = send
        self._size = size
        self._ordered = ordered
        self._read = self._ended = self._given = 0
        self._outstanding: dict[int, tuple[str, Callable[[], object]]] = {}
        self._arrived: SimpleQueue[tuple[int, End]] = SimpleQueue()
        # By the turn in which they are given out.
        self._results: dict[int, Result] = {}

    @property
    def empty(self) -> bool:
        return self._read == self._given

    @property
    def full(self) -> bool:
        return self._read - self._given >= self._size

    def add(self, code: str) -> None:
        """Sends one more. Raises what the sender does, but for the code's own fault."""
        index = self._read
        self._read += 1
        try:
            withdraw = self._send(code, partial(self._arrive, index))
        except UsageError as error:
            self._keep(Result(index, code, error=error))
        else:
            self._outstanding[index] = code, withdraw

    def next_is_there(self, *, wait: bool = False) -> bool:
        """Takes note of what has ended; whether the next result is there, or ``wait`` until it is.

        Raises what a request ended with if that is no error of leanq's.
        """
        while not self._arrived.empty() or (wait and self._given not in self._results):
            index, end = self._arrived.get()
            code, _ = self._outstanding.pop(index)
            if isinstance(end, Reply):
                self._keep(Result(index, code, reply=end))
            elif isinstance(end, LeanQError):
                self._keep(Result(index, code, error=end))
            else:
                raise end
        return self._given in self._results

    def give(self) -> Result:
        """The next result, which must be there."""
        result = self._results.pop(self._given)
        self._given += 1
        return result

    def withdraw(self) -> None:
        """Withdraws all that is outstanding."""
        for _, withdraw in self._outstanding.values():
            withdraw()

    def _keep(self, result: Result) -> None:
        self._results[result.index if self._ordered else self._ended] = result
        self._ended += 1

    def _arrive(self, index: int, end: End) -> None:
        self._arrived.put((index, end))
        self.wake()


def _results(window: _Window, codes: Iterator[str]) -> Generator[Result, None, None]:
    try:
        for code in codes:
            window.add(code)
            for _ in range(_GIVEN_PER_READ):
                if window.next_is_there(wait=window.full):
                    yield window.give()
        while not window.empty:
            window.next_is_there(wait=True)
            yield window.give()
    finally:
        window.withdraw()


async def _aresults(
    window: _Window, codes: Iterator[str] | AsyncIterable[str]
) -> AsyncGenerator[Result, None]:
    loop = asyncio.get_running_loop()
    changed, room = asyncio.Event(), asyncio.Event()
    woken = False

    def wake() -> None:
        nonlocal woken
        if not woken:
            woken = True
            # A loop that was closed amid the iteration has nobody to be woken.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(awake)

    def awake() -> None:
        nonlocal woken
        # In this order: what arrives from here on wakes again.
        woken = False
        changed.set()

    async def add(code: str) -> None:
        window.add(code)
        # What could not be sent has ended already.
        changed.set()
        # However fast codes come, everybody else has a turn.
        await asyncio.sleep(0)
        while window.full:
            room.clear()
            await room.wait()

    async def read() -> None:
        if isinstance(codes, AsyncIterable):
            async for code in codes:
                await add(code)
        else:
            for code in codes:
                await add(code)

    window.wake = wake
    reader = loop.create_task(read())
    reader.add_done_callback(lambda _: changed.set())
    try:
        while True:
            changed.clear()
            if reader.done():
                reader.result()
            if window.next_is_there():
                # The reader goes on, whatever is done with the results.
                await asyncio.sleep(0)
                result = window.give()
                room.set()
                yield result
            elif reader.done() and window.empty:
                return
            else:
                await changed.wait()
    finally:
        try:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        finally:
            window.withdraw()


def _many(codes: Iterable[str]) -> Iterable[str]:
    if isinstance(codes, str | bytes):
        raise InvalidRequestError("the codes are a single text; give a list of texts")
    return codes


def _tell(done: Callable[[End], None], future: Future[Reply]) -> None:
    # Cancelled is only what was withdrawn.
    if not future.cancelled():
        done(future.exception() or future.result())
