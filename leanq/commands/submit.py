"""``leanq submit``: files in, verdicts out, as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import isfile
from typing import Any, TextIO, Unpack

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.common import exit_code, interruptible, worst
from leanq.commands.worker import make_worker
from leanq.errors import InvalidRequestError, LeanQError, TooLargeError, UsageError
from leanq.local import EmbeddedServer, UpFile, embedded_settings, running
from leanq.producer.request_builder import Check
from leanq.queue.queue import look
from leanq.queue.requests import Reply, check_reply_to_json
from leanq.queue.settings import MAX_REQUEST_BYTES, Settings
from leanq.queue.wire import unpack_info

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
        """As :func:`leanq.commands.common.exit_code`."""
        return exit_code(self.error or (self.reply.verdict if self.reply else None))


_Source = str | UsageError
"""The Lean text of a file, or what is wrong with it."""


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@options.queue
@options.env
@options.lean
def submit(files: tuple[str, ...], url: str | None, as_json: bool, **how: Unpack[Check]) -> int:
    """Check Lean files and print each one's verdict as it comes.

    A FILE of - is standard input. Without a queue (--url, LEANQ_URL or leanq up) a server and
    a worker are started for the length of the call.

    Exit code: 0 if all are accepted; 1 if one is rejected, incomplete, exhausted or unverified;
    2 for wrong usage or input that cannot be read; 3 where leanq could not give Lean's verdict,
    or no Redis answers.
    """
    # A pipe or a terminal can keep its reader waiting, so what may be one is read while no
    # worker depends on this process and Ctrl-C ends it at once.
    early = {file: read_source(file) for file in files if file == "-" or not isfile(file)}
    return interruptible(_submit(files, early, url, how, as_json))


async def _submit(
    files: Sequence[str],
    early: Mapping[str, _Source],
    url: str | None,
    options: Check,
    as_json: bool,
) -> int:
    codes = set()
    async with (
        queue_at(url) as (place, worker),
        AsyncLeanQClient(place, unavailable_timeout_s=30.0) as client,
    ):
        idle = asyncio.create_task(hint(client.clusters, options))
        try:
            with _progress(len(files), as_json) as show:
                checks = (_check(client, file, early, options) for file in files)
                async for ended in _ends(checks, worker):
                    codes.add(ended.exit_code)
                    show(ended)
        finally:
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)
    return worst(codes)


@contextlib.asynccontextmanager
async def queue_at(
    url: str | None,
) -> AsyncIterator[tuple[str | Settings, set[asyncio.Task[None]]]]:
    """The queue at ``url``, or of ``leanq up``, or a whole one for the length of the call.

    With the task of the worker beside it, if there is one.
    """
    url = url or UpFile(os.environ).read()
    if url:
        yield url, set()
        return
    with contextlib.closing(EmbeddedServer()) as server:
        settings = embedded_settings(server, os.environ)
        # Before the first request, so that a missing Lean is an error, not a wait; and while the
        # server starts.
        worker = make_worker(settings)
        with server:
            async with running(worker) as task:
                yield settings, {task}


async def _ends(
    checks: Iterator[Coroutine[Any, Any, Ended]], worker: set[asyncio.Task[None]]
) -> AsyncIterator[Ended]:
    """Each check's end as it comes. Raises WorkerError where ``worker`` has ended before."""
    pending: set[asyncio.Task[Ended]] = set()
    try:
        while True:
            pending |= {asyncio.create_task(c) for c in islice(checks, _WINDOW - len(pending))}
            if not pending:
                return
            first: Any = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(pending | worker, return_when=first)
            for check in pending & done:
                pending.remove(check)
                yield check.result()
            for ended in worker & done:
                ended.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _check(
    client: AsyncLeanQClient, file: str, early: Mapping[str, _Source], options: Check
) -> Ended:
    source = early[file] if file in early else read_source(file)
    if isinstance(source, UsageError):
        return Ended(file, error=source)
    try:
        return Ended(file, reply=await client.check(source, **options))
    except LeanQError as error:
        return Ended(file, error=error)


def read_source(file: str) -> _Source:
    """The Lean text in ``file``, or on standard input for ``-``; or what is wrong with it."""
    if file == "-" and sys.stdin is None:
        # Otherwise whatever was opened first would be read in its place.
        return InvalidRequestError("standard input is closed")
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as stream:
            data = stream.read(MAX_REQUEST_BYTES + 1)
    except IsADirectoryError:
        return InvalidRequestError("is a directory; name the .lean files in it")
    except OSError as error:
        return InvalidRequestError(error.strerror or str(error))
    if len(data) > MAX_REQUEST_BYTES:
        return TooLargeError(f"is larger than the {MAX_REQUEST_BYTES >> 20} MB that are taken")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        return InvalidRequestError(text)


@contextlib.contextmanager
def _progress(total: int, as_json: bool) -> Any:
    """Yields what shows one end: JSON lines, plain lines, or lines above a progress bar."""
    if as_json:
        yield lambda ended: print(json.dumps(_record(ended)), flush=True)
    elif total > 1 and sys.stdout.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Lines are left whole, as people copy them, and errors stay out of the output.
        console, shared = Console(soft_wrap=True), sys.stderr.isatty()
        with Progress(*columns, transient=True, console=console, redirect_stderr=shared) as bar:
            task = bar.add_task("checking", total=total)

            def show(ended: Ended) -> None:
                _print_plain(ended, sys.stdout)
                bar.advance(task)

            yield show
    else:
        yield lambda ended: _print_plain(ended, sys.stdout)


def _print_plain(ended: Ended, out: TextIO) -> None:
    if ended.reply is None:
        click.echo(f"leanq: {ended.file}: {ended.error}", file=sys.stderr)
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
    for s in reply.sorries:
        lines.append(f"  {ended.file}:{s.line}:{s.column}: state {s.state or 'unknown'}")
        lines += [f"    {line}" for line in (s.goal or "").splitlines()]
    click.echo("\n".join(lines), file=out)


def _record(ended: Ended) -> dict[str, Any]:
    if ended.reply is None:
        return {"file": ended.file, "verdict": None, "error": str(ended.error)}
    return {"file": ended.file, **check_reply_to_json(ended.reply)}


async def hint(clusters: Sequence[Settings], options: Check) -> None:
    """Says why nothing happens, when it is paused or nobody is there to work."""
    await asyncio.sleep(_HINT_AFTER_S)
    # The client itself reports a server that is out of reach.
    with contextlib.suppress(LeanQError):
        seen = [await look(settings) for settings in clusters]
        env, tenant = options["env"], options["tenant"]
        for kind, what, name in (("e", "environment", env), ("t", "tenant", tenant)):
            if any(f"{kind}:{name}" in status.paused for status in seen):
                text = f"the {what} {name!r} is paused; the requests wait (leanq resume)"
                click.echo(f"leanq: {text}", file=sys.stderr)
        workers = [row for status in seen for row in status.workers]
        if not any(env in unpack_info(row.info).get("environments", ()) for row in workers):
            text = f"no worker for the environment {env!r} is alive; the requests wait for one"
            click.echo(f"leanq: {text} (leanq worker)", file=sys.stderr)
