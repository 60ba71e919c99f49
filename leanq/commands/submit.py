"""``leanq submit``, ``verify`` and ``profile``: files in, replies out, as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import stat
import sys
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from os.path import isfile
from typing import Any, TypeVar, Unpack

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.common import EXIT_USAGE, Stopped, beside, interruptible
from leanq.commands.replies import Ended, Summary, lines_of
from leanq.commands.silence import explain_silence
from leanq.errors import (
    InvalidRequestError,
    LeanQError,
    NoWorkerError,
    QueueError,
    TooLargeError,
    UsageError,
)
from leanq.fleet.shown import plural, printable, some_of
from leanq.producer.request_builder import Check, RequestBuilder
from leanq.queue.requests import (
    CHECKED,
    PROFILED,
    VERIFIED,
    WITH_GOALS,
    Reply,
    Request,
    reply_to_json,
)
from leanq.queue.settings import MAX_REQUEST_BYTES, Settings
from leanq.queue.up_file import UpFile

# Files read and outstanding at a time; memory stays flat for any number of files.
_WINDOW = 512
# The wait if no person sees it. A scaler brings a first worker within minutes.
_WAIT_OF_SCRIPTS_S = 600.0
# For somebody to begin to write to a pipe.
_WRITER_S = 5.0
# Of the blank files that are skipped.
_MOST_NAMED = 10
# A shorter command needs no progress bar.
_PROGRESS_AFTER_S = 2.0

_T = TypeVar("_T")

Show = Callable[[Ended, bool], None]
"""Shows an end; the flag asks for one line, since others have said the same before."""

Ask = Callable[..., Coroutine[Any, Any, Reply]]
"""Asks a client about the text of each file, with options of a check."""

_of_files = options.combined(options.client, options.embedded, options.wait, options.env)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...")
@_of_files
@options.lean
@click.option("--goals", is_flag=True, help="Tell the goals before each tactic, too.")
def submit(paths: tuple[str, ...], goals: bool, **how: Any) -> int:
    """Check Lean files and print each one's verdict as it comes.

    Checks all .lean files below a FOLDER but blank ones. A FILE of - is standard input. If nothing
    names a Redis (--url, LEANQ_URL or 'leanq up'), a server and a worker run for the length of the
    call.

    Exit code: 0 if all are accepted; 1 if any is rejected, incomplete, exhausted or unverified;
    3 if leanq has no verdict of Lean's, or no Redis answers. Of several codes, the highest counts.
    2 means wrong usage, or files that cannot be read or are empty; nothing is sent then.
    """
    if goals:
        return _run_files(paths, partial(_check, goals=True), WITH_GOALS, **how)
    return _run_files(paths, _check, CHECKED, **how)


@click.command()
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...")
@click.option(
    "--target",
    metavar="FILE",
    help="Lean text whose theorems, their proofs a sorry, are to be proved.",
)
@click.option(
    "--theorem",
    "theorems",
    multiple=True,
    metavar="NAME",
    help="Instead of a target: a theorem of the environment whose statement is to be proved; may "
    "be given several times.",
)
@click.option(
    "--hole",
    "holes",
    multiple=True,
    metavar="NAME",
    help="A definition of the target whose value the candidate may choose; may be given several "
    "times.",
)
@_of_files
@options.lean
def verify(
    candidates: tuple[str, ...],
    target: str | None,
    theorems: tuple[str, ...],
    holes: tuple[str, ...],
    **how: Any,
) -> int:
    """Check that Lean files prove the theorems of a target.

    A candidate has to prove exactly the target's statements. Prints each candidate's verdict as it
    comes, and which theorem failed by which rule. A CANDIDATE is a file, a folder (all .lean files
    below it), or - for standard input.

    Exit code: as of submit.
    """
    if (target is None) == (not theorems):
        raise UsageError("name either a target with --target, or theorems with --theorem")
    if target == "-" and "-" in candidates:
        raise UsageError("the target and a candidate cannot both be standard input")
    text = None if target is None else read_named(target)
    if text is not None and not text.strip():
        raise UsageError(f"{target}: the target is empty")

    def ask(client: AsyncLeanQClient, code: str, **how: Unpack[Check]) -> Any:
        return client.verify(text, code, theorems=theorems, holes=holes, **how)

    return _run_files(candidates, ask, VERIFIED, **how)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...")
@_of_files
@options.budget
def profile(paths: tuple[str, ...], **how: Any) -> int:
    """Print where Lean spends its time in a text, by declaration.

    A worker runs Lean on each text with Lean's profiler, the heaviest declaration comes first.
    Files, folders and the queue are found as by submit, and the limits are those of a check.
    Imports count against them, since Lean starts anew.

    Times are wall time on all threads, so a busy machine takes longer. The profiler itself takes
    time, too. Nothing is judged: for verdicts use submit.

    Exit code: 0 if Lean told, whatever it says of the text; 3 if leanq has no answer of Lean's; 2
    for wrong usage.
    """
    return _run_files(paths, partial(_check, profile=True), PROFILED, **how)


def _check(client: AsyncLeanQClient, code: str, **how: Unpack[Check]) -> Any:
    return client.check(code, **how)


def _run_files(
    paths: Sequence[str],
    ask: Ask,
    fields: Sequence[str],
    *,
    url: str | None,
    as_json: bool,
    embedded: bool,
    wait_s: float | None,
    **how: Unpack[Check],
) -> int:
    """Asks about each file, prints each end as it comes and a summary; returns the exit code.

    Raises:
        Stopped: a signal came; outstanding requests were withdrawn.
        UsageError: a folder cannot be read, or has no .lean files.
    """
    found = list(lean_files(paths))
    shown_fields = fields if as_json else None
    # A pipe or a terminal can keep its reader waiting. Read it now, while no worker depends on this
    # process and Ctrl-C ends it at once.
    early: dict[str, str] = {}
    blank: list[str] = []
    refused = list(_refused(found, early, {*found} - {*paths}, blank))
    skipped = {*blank}
    files = [file for file in found if file not in skipped]
    if blank:
        text = f"leanq: {plural(len(blank), 'blank file')} skipped: {some_of(blank, _MOST_NAMED)}"
        click.echo(printable(text), err=True)
    if not files:
        raise UsageError(f"there is no text in the .lean files in {', '.join(paths)}")
    if refused:
        for ended in refused:
            _show(ended, shown_fields)
        if not as_json and len(files) > len(refused):
            text = f"{len(refused):,} of {plural(len(files), 'file')} cannot be checked"
            click.echo(f"leanq: nothing was sent: {text}", err=True)
        return EXIT_USAGE
    batch = _Batch(files, early, how, ask)
    started_s = time.monotonic()
    try:
        interruptible(batch.run(url, embedded, wait_s, shown_fields))
    except Stopped as stopped:
        click.echo(f"leanq: {stopped}: {batch.left()}", err=True)
        raise
    if not as_json:
        for text in batch.summary.failures():
            click.echo(f"leanq: {text}", err=True)
        click.echo(batch.summary.line(time.monotonic() - started_s), err=True)
    if warning := batch.summary.warning(how["env"]):
        click.echo(f"leanq: {warning}", err=True)
    return batch.summary.exit_code


def _refused(
    files: Iterable[str], early: dict[str, str], unnamed: AbstractSet[str], blank: list[str]
) -> Iterator[Ended]:
    """Yields the files that no worker could check. Each is read once more when it is sent, but for
    a pipe or a terminal, whose text goes into ``early``. Blank ones that were found in a
    folder, the ``unnamed``, go into ``blank``."""
    for file in files:
        try:
            text = early.get(file) or read_source(file)
            if file in unnamed and not text.strip():
                blank.append(file)
                continue
            Request("check", code=text)
        except UsageError as error:
            yield Ended(file, error=error)
        else:
            if file == "-" or not isfile(file):
                early[file] = text


def lean_files(paths: Sequence[str]) -> Iterator[str]:
    """Yields the named files, and all .lean files below named folders, sorted.

    Names that begin with a dot are skipped, since projects keep their packages under one. Links to
    folders are not followed.

    Raises:
        UsageError: a folder cannot be read, or has no such files.
    """
    for path in paths:
        if path == "-" or not os.path.isdir(path):
            yield path
            continue
        found = sorted(_below(path))
        if not found:
            raise UsageError(f"there are no .lean files in {path}")
        yield from found


def _below(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: {error.strerror}")

    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = os.path.join(where, name)
            # Reading a pipe would wait for ever.
            if name.endswith(".lean") and not name.startswith(".") and os.path.isfile(path):
                yield path


@dataclass
class _Batch:
    """The files of one call, on their way through the queue."""

    files: Sequence[str]
    early: Mapping[str, str]
    how: Check
    ask: Ask
    summary: Summary = field(default_factory=Summary)
    sent: int = 0
    answered: int = 0

    def left(self) -> str:
        """Returns how far the call was when it was stopped."""
        withdrawn, unsent = self.sent - self.answered, len(self.files) - self.sent
        text = f"{self.answered:,} of {plural(len(self.files), 'file')} ended"
        text += f", {plural(withdrawn, 'request')} withdrawn"
        return text + (f", {unsent:,} not sent" if unsent else "")

    async def run(
        self, url: str | None, embedded: bool, wait_s: float | None, fields: Sequence[str] | None
    ) -> None:
        if wait_s is None and not sys.stderr.isatty():
            wait_s = _WAIT_OF_SCRIPTS_S
        async with (
            queue_at(url, embedded=embedded) as (place, worker),
            client_at(place, unavailable_timeout_s=30.0, no_worker="wait") as client,
        ):
            # A wrong option is named once, before anything is sent.
            RequestBuilder(client.settings, self.how["tenant"]).shared(self.how)
            # The call's own worker ends the call if it cannot serve.
            within_s = None if worker else wait_s
            why = explain_silence(client.clusters, self.how, lambda: self.answered, within_s)
            left = Counter(self.files)
            async with beside(why) as silence, _shown(len(self.files), fields) as show:
                checks = (self._check(client, file) for file in self.files)
                try:
                    async for ended in ends(checks, {silence, *worker}):
                        left[ended.file] -= 1
                        self.summary.add(ended)
                        show(ended, self.summary.explained(ended))
                except NoWorkerError as error:
                    for file in left.elements():
                        ended = Ended(file, error=error)
                        self.summary.add(ended)
                        show(ended, False)

    async def _check(self, client: AsyncLeanQClient, file: str) -> Ended:
        self.sent += 1
        try:
            source = self.early.get(file) or read_source(file)
            ended = Ended(file, reply=await self.ask(client, source, **self.how))
        except LeanQError as error:
            ended = Ended(file, error=error)
        self.answered += 1
        return ended


@contextlib.asynccontextmanager
async def queue_at(
    url: str | None, *, embedded: bool = False, environments: Sequence[str] = ()
) -> AsyncIterator[tuple[str | Settings, set[asyncio.Task[None]]]]:
    """Yields the queue at ``url``, or of ``leanq up``, or one for the length of the call.

    The latter comes with the tasks of its worker and of its server's watch, which end with errors
    alone. Its worker offers the ``environments``. ``embedded`` always starts one.
    """
    written = UpFile(os.environ).read
    if url and not embedded:
        yield url, set()
        return
    if not embedded and (named := written()):
        # Another `leanq up` has another address.
        yield replace(Settings.load(named, os.environ), written=written), set()
        return
    # Their import takes as long as a small check, and most calls name a queue.
    from leanq.commands.worker import make_worker
    from leanq.local import EmbeddedServer, running

    with contextlib.closing(EmbeddedServer()) as server:
        settings = server.settings()
        # Before the first request, so that a missing Lean is an error and not a wait; and while the
        # server starts.
        worker = make_worker(settings, environments=environments)
        with server:
            async with running(worker) as task, beside(server.watch()) as watching:
                yield settings, {task, watching}


def client_at(place: str | Settings, **how: Any) -> AsyncLeanQClient:
    """Returns the client of the running command."""
    insecure = bool(click.get_current_context().meta.get(options.INSECURE_HTTP))
    return AsyncLeanQClient(place, insecure_http=insecure, **how)


async def ends(
    checks: Iterator[Coroutine[Any, Any, _T]], beside: AbstractSet[asyncio.Task[None]]
) -> AsyncIterator[_T]:
    """Yields each check's end as it comes; raises what a task of ``beside`` raises before."""
    pending: set[asyncio.Task[_T]] = set()
    try:
        while True:
            pending |= {asyncio.create_task(c) for c in islice(checks, _WINDOW - len(pending))}
            if not pending:
                return
            first: Any = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(pending | beside, return_when=first)
            for check in pending & done:
                pending.remove(check)
                yield check.result()
            for ended in beside & done:
                ended.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def read_source(file: str) -> str:
    """Returns the Lean text in ``file`` (``-``: standard input); raises UsageError."""
    if file == "-" and sys.stdin is None:
        # Otherwise the first file to be opened would be read in its place.
        raise InvalidRequestError("standard input is closed")
    try:
        data = _data_of(file)
    except OSError as error:
        raise InvalidRequestError(error.strerror or str(error)) from None
    if len(data) > MAX_REQUEST_BYTES:
        raise TooLargeError(f"is larger than the {MAX_REQUEST_BYTES >> 20} MB that are taken")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        raise InvalidRequestError(text) from None


def _data_of(file: str) -> bytes:
    """Returns a file's first bytes, one more than are taken; raises InvalidRequestError for a pipe
    that nobody writes to."""
    if file == "-":
        with open(0, "rb", closefd=False) as stream:
            return stream.read(MAX_REQUEST_BYTES + 1)
    # To open a pipe would wait for its writer, and for ever if none comes.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as stream:
        begun: bytes | None = None
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            begun = stream.raw.read(1 << 16)
            # None: a writer is there, and has not written yet.
            if begun == b"" and not select.select([fd], [], [], _WRITER_S)[0]:
                raise InvalidRequestError("is a pipe to which nobody writes")
        os.set_blocking(fd, True)
        return (begun or b"") + stream.read(MAX_REQUEST_BYTES + 1)


def read_named(file: str) -> str:
    """Returns the Lean text in ``file``; raises UsageError, which names the file."""
    try:
        return read_source(file)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


@contextlib.asynccontextmanager
async def _shown(total: int, fields: Sequence[str] | None) -> AsyncIterator[Show]:
    """Yields a function that shows one end: as a JSON line of the ``fields``, or as plain lines
    above a progress bar."""
    if fields or not (sys.stdout.isatty() or sys.stderr.isatty()):
        yield lambda ended, brief: _show(ended, fields, brief=brief)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    bar = Progress(
        *("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        transient=True,
        # Lines are not wrapped, since people copy them. The bar leaves redirected output alone.
        console=Console(soft_wrap=True, stderr=not sys.stdout.isatty()),
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
    task = bar.add_task("checking", total=total)

    async def begin() -> None:
        await asyncio.sleep(_PROGRESS_AFTER_S)
        bar.start()

    def show(ended: Ended, brief: bool) -> None:
        _show(ended, fields, brief=brief)
        bar.advance(task)

    beginning = asyncio.create_task(begin())
    try:
        yield show
    finally:
        beginning.cancel()
        bar.stop()


def _show(ended: Ended, fields: Sequence[str] | None, *, brief: bool = False) -> None:
    # click's own choice of the stream would write across the progress bar.
    if fields:
        failed = {"verdict": None, "error": str(ended.error)}
        shown = reply_to_json(ended.reply, fields) if ended.reply else failed
        print(json.dumps({"file": ended.file, **shown}), flush=True)
    elif ended.reply:
        click.echo("\n".join(lines_of(ended.file, ended.reply, brief=brief)), file=sys.stdout)
    elif not isinstance(ended.error, QueueError):
        # The summary tells trouble with the queue once for all files.
        click.echo(f"leanq: {ended.file}: {ended.error}", file=sys.stderr)
