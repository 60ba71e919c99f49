"""``leanq submit``: files in, verdicts out, as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from ..client import AsyncLeanQClient, Check
from ..config import MAX_REQUEST_BYTES, Settings
from ..errors import InvalidRequestError, LeanQError, RequestError, TooLargeError, UsageError
from ..local import EmbeddedServer, UpFile, embedded_settings, running
from ..queue import Queue
from ..wire import LEAN_VERDICTS, Reply
from .build import make_worker

# Files that are read and outstanding at a time, so that memory stays flat for any number.
_WINDOW = 512
_HINT_AFTER_S = 3.0

_COLOURS = {"accepted": "green", "incomplete": "yellow", "rejected": "red"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How one file ended: a reply, or why there is none."""

    file: str
    reply: Reply | None = None
    error: LeanQError | None = None

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 Lean says no, 2 bad input, 3 no verdict of Lean's."""
        if isinstance(self.error, UsageError | RequestError):
            return 2
        if self.reply is None or self.reply.verdict not in LEAN_VERDICTS:
            return 3
        return 0 if self.reply.verdict == "accepted" else 1


def submit(files: Sequence[str], url: str | None, options: Check, as_json: bool) -> int:
    """Checks ``files`` (``-``: standard input) and prints each one's end; the exit code."""
    return asyncio.run(_submit(files, url, options, as_json))


async def _submit(files: Sequence[str], url: str | None, options: Check, as_json: bool) -> int:
    codes = set()
    async with _queue_at(url) as settings, AsyncLeanQClient(settings, patience_s=30.0) as client:
        hint = asyncio.create_task(_hint(settings))
        try:
            with _progress(len(files), as_json) as show:
                async for ended in _check_all(client, files, options):
                    codes.add(ended.exit_code)
                    show(ended)
        finally:
            hint.cancel()
            await asyncio.gather(hint, return_exceptions=True)
    # Wrong usage is what to mend first; then what is wrong with the fleet; then the proofs.
    return next((code for code in (2, 3, 1) if code in codes), 0)


@contextlib.asynccontextmanager
async def _queue_at(url: str | None) -> AsyncIterator[Settings]:
    """The queue at ``url``, or of ``leanq up``, or a whole one for the length of the call."""
    url = url or UpFile(os.environ).read()
    if url:
        yield Settings.load(url, os.environ)
        return
    with EmbeddedServer() as server:
        settings = embedded_settings(server, os.environ)
        # Checked before the first request, so that a missing Lean is an error, not a wait.
        worker = make_worker(settings)
        async with running(worker) as task:
            await asyncio.wait({task, asyncio.create_task(worker.joined.wait())}, **_FIRST)
            if task.done():
                task.result()
            yield settings


_FIRST: Any = {"return_when": asyncio.FIRST_COMPLETED}


async def _check_all(
    client: AsyncLeanQClient, files: Sequence[str], options: Check
) -> AsyncIterator[Ended]:
    pending: set[asyncio.Task[Ended]] = set()
    rest = iter(files)
    try:
        while True:
            while len(pending) < _WINDOW and (file := next(rest, None)) is not None:
                pending.add(asyncio.create_task(_check(client, file, options)))
            if not pending:
                return
            done, pending = await asyncio.wait(pending, **_FIRST)
            for task in done:
                yield task.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _check(client: AsyncLeanQClient, file: str, options: Check) -> Ended:
    try:
        return Ended(file, reply=await client.check(read_source(file), **options))
    except LeanQError as error:
        return Ended(file, error=error)


def read_source(file: str) -> str:
    """The Lean text in ``file``, or on standard input for ``-``.

    Raises:
        UsageError: names the file, what is wrong with it, and what to do.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except IsADirectoryError:
        raise InvalidRequestError("is a directory; name the .lean files in it") from None
    except OSError as error:
        raise InvalidRequestError(error.strerror or str(error)) from None
    if len(data) > MAX_REQUEST_BYTES:
        limit = MAX_REQUEST_BYTES >> 20
        raise TooLargeError(f"has {len(data)} bytes; at most {limit} MB are taken")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        raise InvalidRequestError(text) from None


@contextlib.contextmanager
def _progress(total: int, as_json: bool) -> Any:
    """Yields what shows one end: JSON lines, plain lines, or lines above a progress bar."""
    if as_json:
        yield lambda ended: print(json.dumps(_record(ended), ensure_ascii=False), flush=True)
    elif total > 1 and sys.stdout.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("checking", total=total)

            def show(ended: Ended) -> None:
                _print_plain(ended, sys.stdout)
                bar.advance(task)

            yield show
    else:
        yield lambda ended: _print_plain(ended, sys.stdout)


def _print_plain(ended: Ended, out: TextIO) -> None:
    if ended.reply is None:
        click.echo(f"leanq: {ended.file}: {ended.error}", err=True)
        return
    reply = ended.reply
    verdict = click.style(reply.verdict, fg=_COLOURS.get(reply.verdict or "", "magenta"), bold=True)
    notes = [f"{reply.wall_s:.2f} s"]
    if reply.axioms is not None:
        notes.append(f"axioms: {', '.join(reply.axioms) or 'none'}")
    lines = [f"{ended.file}: {verdict} ({'; '.join(notes)})"]
    for m in reply.messages:
        head, *more = m.text.splitlines() or [""]
        lines.append(f"  {ended.file}:{m.line}:{m.column}: {m.severity}: {head}")
        lines += [f"    {line}" for line in more]
    click.echo("\n".join(lines), file=out)


def _record(ended: Ended) -> dict[str, Any]:
    if ended.reply is None:
        return {"file": ended.file, "verdict": None, "error": str(ended.error)}
    record = {"file": ended.file, **asdict(ended.reply)}
    # What belongs to other operations is no part of a check's line.
    for name in ("payload", "error"):
        del record[name]
    return record


async def _hint(settings: Settings) -> None:
    """Says why nothing happens, when nobody is there to work."""
    await asyncio.sleep(_HINT_AFTER_S)
    queue = Queue(settings)
    try:
        if not (await queue.status()).workers:
            text = "no worker is alive on this queue; the requests wait for one (leanq worker)"
            click.echo(f"leanq: {text}", err=True)
    except LeanQError:
        # The client itself reports a server that is out of reach.
        return
    finally:
        await queue.close()
