"""Shared by commands: finding the queue, ending at a signal, and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from leanq.errors import LeanQError, RequestError, UsageError
from leanq.queue.requests import LEAN_VERDICTS
from leanq.queue.settings import Settings
from leanq.queue.up_file import UpFile

if TYPE_CHECKING:
    from leanq.queue.operator_queue import OperatorQueue

_T = TypeVar("_T")

EXIT_OK = 0
EXIT_NOT_ACCEPTED = 1
EXIT_USAGE = 2
EXIT_INFRASTRUCTURE = 3
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141
"""A shell's exit code for a program that SIGPIPE ended."""


def exit_code(end: str | LeanQError | None) -> int:
    """Returns the exit code for a verdict, or for the error that came in its place.

    0 accepted; 1 another verdict of Lean's; 2 bad input; 3 an outcome of leanq's.
    """
    if isinstance(end, UsageError | RequestError):
        return EXIT_USAGE
    if isinstance(end, LeanQError) or end not in LEAN_VERDICTS:
        return EXIT_INFRASTRUCTURE
    return EXIT_OK if end == "accepted" else EXIT_NOT_ACCEPTED


def queue_url(url: str | None) -> str:
    """Returns the URL of a command's queue: ``--url``, LEANQ_URL, or this machine's ``leanq up``.

    Raises:
        UsageError: none of them names one.
    """
    url = url or UpFile(os.environ).read()
    if url is None:
        raise UsageError(
            "no queue: name a Redis with --url or LEANQ_URL, or start one here with 'leanq up'"
        )
    return url


def queue_settings(url: str | None) -> Settings:
    """Returns the settings of a command's queue; raises UsageError as :func:`queue_url`."""
    return Settings.load(queue_url(url), os.environ)


def on_queues(url: str | None, work: Callable[[Sequence[OperatorQueue]], Awaitable[_T]]) -> _T:
    """Returns what ``work`` returns for all shards of a command's queue."""
    # Clients need none of it.
    from leanq.queue.operator_queue import every_queue

    async def run() -> _T:
        async with every_queue(queue_settings(url)) as queues:
            return await work(queues)

    return asyncio.run(run())


def tell(as_json: bool, records: Iterable[object], lines: Iterable[str]) -> None:
    """Prints records as JSON, one a line, or else the lines for people."""
    for line in map(json.dumps, records) if as_json else lines:
        click.echo(line)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Runs ``work`` as a task beside the block, and cancels it behind the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` until it ends, or SIGTERM or SIGINT cancels it."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


class Stopped(Exception):  # noqa: N818
    """A signal stopped the command, and it has cleaned up.

    Attributes:
        exit_code: a shell's exit code for a program that the signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.exit_code = 128 + number


def interruptible(main: Coroutine[Any, Any, _T]) -> _T:
    """Returns what ``main`` returns. SIGINT or SIGTERM cancels it; a second signal ends the
    process.

    Raises:
        Stopped: a signal came, and ``main`` has cleaned up.
    """
    came: list[int] = []

    async def run() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.create_task(main)

        def stop(number: int, _: object) -> None:
            # An exception would come in the middle of cleaning up. Nothing outlives the process.
            for each in before:
                signal.signal(each, signal.SIG_DFL)
            came.append(number)
            loop.call_soon_threadsafe(task.cancel)

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # A program that was started in the background ignores SIGINT.
        before = {n: handler for n, handler in before.items() if handler != signal.SIG_IGN}
        for number in before:
            signal.signal(number, stop)
        try:
            return await task
        finally:
            if not came:
                for number, handler in before.items():
                    signal.signal(number, handler)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise Stopped(came[0] if came else signal.SIGINT) from None
