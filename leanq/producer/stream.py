"""Checks many codes through one client: it reads them as needed and streams their results.

The *window* holds the codes that were read and whose results were not given out yet. It bounds the
outstanding requests and the kept results, so memory stays flat for any number of codes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from leanq.errors import InvalidRequestError, LeanQError, UsageError
from leanq.producer import arguments
from leanq.queue.requests import Reply, Verdict

log = logging.getLogger("leanq.client")

WINDOW = 512

# At most so many results are given out for each code that is read. With more than one, a backlog
# drains; with a bound, the fleet gets more work meanwhile.
_GIVEN_PER_READ = 2

ReplyOrError = Reply | BaseException
Send = Callable[[str, Callable[[ReplyOrError], None]], Callable[[], object]]
"""Sends a code, and calls the function once, in any thread, with its end.

Returns a function that withdraws the request, whose end may then never be told."""

# The warning about imports waits for so many results.
_ENOUGH_RESULTS = 8


@dataclass(frozen=True, slots=True)
class Result:
    """The end of one of many codes: its reply, or the error why there is none.

    ``index``: its place in the input, from 0.
    """

    index: int
    code: str
    reply: Reply | None = None
    error: LeanQError | None = None

    @property
    def verdict(self) -> Verdict | None:
        """Returns the reply's verdict, or ``None`` if there is no reply."""
        return self.reply.verdict if self.reply else None


def stream(
    send: Send, environment: str, codes: Iterable[str], window: int, ordered: bool
) -> Generator[Result, None, None]:
    """Yields the results of ``codes``, which ``send`` sends; as ``LeanQClient.map``."""
    return _results(_Window(send, environment, window, ordered), iter(_many(codes)))


def astream(
    send: Send,
    environment: str,
    codes: Iterable[str] | AsyncIterable[str],
    window: int,
    ordered: bool,
) -> AsyncGenerator[Result, None]:
    """Yields the results of ``codes``, which ``send`` sends; as ``LeanQClient.amap``."""
    source = codes if isinstance(codes, AsyncIterable) else iter(_many(codes))
    return _aresults(_Window(send, environment, window, ordered), source)


# Reasons that concern the environment rather than the code.
_SAID = {
    "unknown_import": "have an import that the environment does not have",
    "judge_unavailable": "cannot be judged, since the worker has no judge that works",
    "library_unreadable": "import a library that the environment's Lean cannot read",
}


class _BatchWarning:
    """Logs once when most results have the same reason and the environment causes it."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._ended = 0
        self._counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}
        self._logged = False

    def note(self, result: Result) -> None:
        self._ended += 1
        reason = (result.reply and result.reply.reason) or ""
        if result.reply and reason in _SAID:
            self._counts[reason] += 1
            self._texts.setdefault(reason, _last_of_ours(result.reply))
        if self._logged or self._ended < _ENOUGH_RESULTS:
            return
        for each, count in self._counts.items():
            if 2 * count > self._ended:
                self._logged = True
                log.warning(
                    "%d of %d results so far %s (environment %r): %s",
                    *(count, self._ended, _SAID[each], self._environment, self._texts[each]),
                )


def _last_of_ours(reply: Reply) -> str:
    """Returns leanq's own first message on it, or else the first line of the first message."""
    texts = [message.text for message in reply.messages]
    ours = [message.text for message in reply.messages if message.is_ours]
    return (ours or texts or [""])[0].partition("\n")[0].removeprefix("leanq: ")


class _Window:
    """Holds the codes from their reading until their results are given out.

    Ends may arrive in any thread; the thread that iterates makes all other calls.
    """

    def __init__(self, send: Send, environment: str, size: int, ordered: bool) -> None:
        size = arguments.whole_number("window", size, 1)
        ordered = arguments.flag("ordered", ordered)
        self._import_warning = _BatchWarning(environment)
        self.wake: Callable[[], object] = lambda: None
        self._send = send
        self._size = size
        self._ordered = ordered
        self._read = self._ended = self._given = 0
        self._outstanding: dict[int, tuple[str, Callable[[], object]]] = {}
        self._arrived: SimpleQueue[tuple[int, ReplyOrError]] = SimpleQueue()
        # By their place in the order in which they are given out.
        self._results: dict[int, Result] = {}

    @property
    def empty(self) -> bool:
        return self._read == self._given

    @property
    def full(self) -> bool:
        return self._read - self._given >= self._size

    def add(self, code: str) -> None:
        """Sends one more code. A UsageError becomes its result; other errors are raised."""
        index = self._read
        self._read += 1
        try:
            withdraw = self._send(code, partial(self._arrive, index))
        except UsageError as error:
            self._keep(Result(index, code, error=error))
        else:
            self._outstanding[index] = code, withdraw

    def next_is_there(self, *, wait: bool = False) -> bool:
        """Takes in the ends that arrived; returns whether the next result is there.

        ``wait``: wait until it is. Raises the error that a request ended with, if it is not leanq's
        own.
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
        """Returns the next result, which must be there."""
        result = self._results.pop(self._given)
        self._given += 1
        return result

    def withdraw(self) -> None:
        for _, withdraw in self._outstanding.values():
            withdraw()

    def _keep(self, result: Result) -> None:
        self._import_warning.note(result)
        self._results[result.index if self._ordered else self._ended] = result
        self._ended += 1

    def _arrive(self, index: int, end: ReplyOrError) -> None:
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
            # A loop that was closed during the iteration has no task to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(awake)

    def awake() -> None:
        nonlocal woken
        # Reset first: an end that arrives while the loop looks at the others must wake it again.
        woken = False
        changed.set()

    async def add(code: str) -> None:
        window.add(code)
        # A refused code has its result already.
        changed.set()
        # Let other tasks of the loop run, however fast codes come.
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
                # Give the reader a turn, even if the loop over the results never awaits anything.
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
    if not isinstance(codes, Iterable):
        raise arguments.wrong_type("codes", "an iterable of texts", codes)
    return codes
