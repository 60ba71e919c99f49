"""The program ``lean`` in one environment: its sandboxes, and its runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from leanq.errors import SandboxError, ToolchainError
from leanq.lean.environment import Environment
from leanq.lean.outcome import Printed, classify, signal_name, unknown_imports
from leanq.lean.run.documents import Documents
from leanq.lean.run.documents import Key as DocumentKey
from leanq.lean.run.evaluations import FREE
from leanq.lean.run.files import LocalSnapshot
from leanq.lean.run.fork_server import ForkServer
from leanq.lean.run.headers import forkable_header
from leanq.lean.run.proof import Key, RunBytes, compiled_by
from leanq.lean.run.toolchain import UNREADABLE
from leanq.lean.sandbox.sandbox import Exit, Finished, Limits, Sandbox
from leanq.lean.sandbox.walls import advice, missing_walls
from leanq.lean.text import split_header
from leanq.queue.metrics import count
from leanq.queue.requests import Reply, Request, Spent, Way
from leanq.queue.tasks import run_apart

log = logging.getLogger("leanq.worker")

# The module name of every candidate's result; no library uses it.
MODULE = "LeanqSubmission"
_COMPILE = ("-o", f"{MODULE}.olean")
_SNAPSHOT = "snapshot"
# Of a constant's value, which the compiler has put aside.
_PART = re.compile(r"(?:\._closed_\d+)+\Z")
PROFILER = "-Dprofiler=true"
# Lean starts anew with these: a second run of the same text prints something else.
_NOT_FORKED = ("--incr", PROFILER)
# What Lean's language server cannot do.
_ABILITY = re.compile("--|-Dprofiler")
_PRINTED_AT_ONCE_BYTES = 20_000
# Any Lean takes this text in a working environment.
_TRIAL = "theorem leanq_trial (p : Prop) (h : p) : p := h\n"
# Lean's start takes less.
_AT_ONCE_CPU_S = 1.0
# A fork that waits at its wall limit, and has for this share of it, may lack what it waits for.
_WAITING_SHARE = 0.5
# Of its wall limit: for so long a text waits for a process that imports its header.
_PATIENCE_SHARE = 0.5
# To ask for axioms only imports and prints, but a library may be large and a disk cold.
_ASK_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=8 << 30)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What Lean evaluated of a text, told by its process before it did: the first constant of the
    text's own, and the first of those that are ``free`` values; empty for none."""

    first: str = ""
    free: str = ""

    @classmethod
    def of(cls, reports: Sequence[str]) -> Evaluated:
        first = reports[0] if reports else ""
        free = next((each for each in reports if each.startswith(FREE.decode())), "")
        return cls(*(_PART.sub("", each[1:]) for each in (first, free)))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of Lean on a text within limits. ``spent``: how Lean began, for the reply.
    ``evaluated``: None if nobody watched."""

    done: Finished
    limits: Limits
    printed: Printed
    compiled: bool
    way: Way = "replayed"
    spent: Spent | None = None
    evaluated: Evaluated | None = None

    @property
    def outcome(self) -> Reply:
        """Lean's answer before any audit."""
        reply = classify(self.printed, self.done, self.limits, compiled=self.compiled)
        return structs.replace(reply, cpu_s=self.done.exit.cpu_s)

    @property
    def died(self) -> bool:
        """True if Lean ended by itself and without a verdict on the text."""
        end = self.done.exit
        if end.stopped is not None:
            return False
        has_verdict = self.printed.failed or self.printed.exhausted
        return end.code is None or not (has_verdict or (end.code == 0 and self.compiled))


@dataclass(eq=False)
class Slot:
    """A place for one run of Lean at a time, each in a sandbox. It stands behind the text's header
    if the fork server has imported that; otherwise Lean starts in it."""

    sandbox: Sandbox | None = None
    plain: Sandbox | None = None
    forked: dict[Key, Sandbox] = field(default_factory=dict)
    command: Sequence[str] = ()
    """What ran last behind a preloaded header."""

    @property
    def left(self) -> Path:
        """The last run's scratch folder."""
        assert self.sandbox is not None
        return self.sandbox.left


@dataclass(eq=False)
class Lean:
    """Lean in one environment, with at most ``slots`` idle sandboxes. Every text comes through
    standard input. ``inbox_root``: a folder on the disk of the snapshots to load."""

    environment: Environment
    slots: int
    forks: ForkServer | None = None
    documents: Documents | None = None
    hidden: Sequence[Path] = ()
    nice: int = 0
    inbox_root: Path | None = None
    idle: list[Sandbox] = field(default_factory=list)
    _closed: bool = False
    _proving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _proved_s: float = 0.0
    _lost: tuple[str, ...] = ()

    async def open(self) -> None:
        """Raises WorkerError if Lean cannot run in a sandbox."""
        opened = await asyncio.gather(*(self._new_sandbox() for _ in range(self.slots)))
        self.idle.extend(opened)
        if missing := missing_walls(opened[0].isolation):
            log.warning("the sandbox lacks %s: %s", ", ".join(missing), advice(missing))
        await self.prove()

    async def prove(self) -> None:
        """Has Lean compile a theorem of ours in a sandbox like a candidate's, after this call; and
        looks for the modules that it did not find any more. Raises ToolchainError if this machine
        is to blame, as Lean would seem to crash on each candidate."""
        asked_s = time.monotonic()
        async with self._proving:
            # One trial is enough for all deaths before it.
            if self._proved_s > asked_s:
                return
            began_s = time.monotonic()
            await self._look_for(self._lost)
            await self._try_lean()
            self._proved_s = began_s

    async def close(self) -> None:
        """Ends the idle sandboxes now, and the others when they come back."""
        self._closed = True
        if self.forks is not None:
            await self.forks.close()
        # A run that asks for one meanwhile must not get one that closes.
        idle = list(self.idle)
        self.idle.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in idle))

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Yields a place for runs, one after the other."""
        slot = Slot()
        try:
            yield slot
        finally:
            # Sandboxes for the old files must not serve the changed environment.
            if slot.plain is not None and slot.plain.alive and not self._closed:
                slot.plain.clear()
                self.idle.append(slot.plain)
            elif slot.plain is not None:
                await slot.plain.close()
            for key, sandbox in slot.forked.items():
                assert self.forks is not None
                await self.forks.give_back(key, sandbox, slot.command)

    async def run(
        self,
        slot: Slot,
        code: str,
        limits: Limits,
        *,
        options: Sequence[str] = (),
        load: LocalSnapshot | None = None,
        compile_: bool = True,
        tenant: str | None = None,
    ) -> Run:
        """Runs Lean on a text. If it is to be compiled, the slot's :func:`olean` is the result.
        ``load``: a snapshot of a text that begins alike. ``tenant``: whose other texts the same
        process may have read, a fork or Lean's language server; None for one that has read none.

        If it dies or cannot be started, Lean is tried with a text of ours. If it died at once, as
        when something was missing for a moment, the text runs once more. Raises ToolchainError if
        Lean does not work on this machine any more, and SandboxError if the process could not be
        started or watched, although Lean works.
        """
        read = None
        if tenant is not None and load is None and not any(map(_ABILITY.match, options)):
            read = await self._read(code, limits, options, tenant, compile_=compile_)
            if read is not None and not (self.documents and self.documents.is_compared()):
                return read
        try:
            run = await self._run(slot, code, limits, options, load, compile_, tenant)
            if run.died:
                await self.prove()
                at_once = not run.printed.messages and run.done.exit.cpu_s < _AT_ONCE_CPU_S
                if at_once or run.done.exit.earlier:
                    run = await self._run(slot, code, limits, options, load, compile_)
        except SandboxError:
            await self.prove()
            raise
        if run.printed.failed:
            await self._look_for(unknown_imports(run.printed.messages))
        if read is not None and self.documents is not None:
            if run.died or run.done.exit.stopped:
                return read
            self.documents.compare(read.printed, run.printed)
        return run

    async def watch(
        self, slot: Slot, code: str, limits: Limits, *, options: Sequence[str] = ()
    ) -> Run | None:
        """Compiles a text as :meth:`run` does, where it is seen what Lean evaluates: behind its
        header, which is preloaded if need be. Returns None, and runs nothing, where that cannot
        be. If there is no fork now, nobody watches."""
        if self.forks is None:
            return None
        key = self.forks.key(code, self.command([*options, *_COMPILE]))
        if key is None or not await self.forks.is_ready(key):
            return None
        return await self._run(slot, code, limits, options, None, True)

    @property
    def reads_documents(self) -> bool:
        """Whether Lean's language server may read texts here: where no fork serves them."""
        gave_up = self.forks is None or bool(self.forks.unavailable)
        return gave_up and self.documents is not None and not self.documents.unavailable

    async def _read(
        self, code: str, limits: Limits, options: Sequence[str], tenant: str, *, compile_: bool
    ) -> Run | None:
        """Has Lean's language server read a text where no fork serves it. Returns None if a Lean of
        its own has to run: it could be accepted, or a budget ended it."""
        documents = self.documents
        if documents is None or not self.reads_documents:
            return None
        if forkable_header(self.environment, code) is None:
            return None
        asked_s = time.monotonic()
        defined = tuple(each for each in self._known(options) if each.startswith("-D"))
        key = DocumentKey(tenant, split_header(code).text, defined)
        found = await documents.read(key, code, limits)
        if found is None:
            return None
        done, printed = found
        if printed.exhausted or (compile_ and not printed.failed):
            return None
        begun_s = max(0.0, time.monotonic() - asked_s - done.exit.wall_s)
        spent = Spent(begun_us=round(begun_s * 1e6), is_forked=True)
        return Run(done, limits, printed, compiled=not compile_, spent=spent)

    async def _look_for(self, modules: Iterable[str]) -> None:
        """Raises ToolchainError if one of these modules was there when the environment was opened,
        and is not any more: its file is lost, and no text to blame."""
        wanted = tuple(dict.fromkeys(modules))
        lost = await asyncio.to_thread(self.environment.lost, wanted) if wanted else ()
        self._lost = lost or self._lost
        if lost:
            name = self.environment.name
            raise ToolchainError(
                f"the library of the environment {name!r} has lost {', '.join(lost[:5])} on this "
                f"machine since this worker opened it ({self.environment.toolchain}). Bring the "
                "file back, or reinstall what it belongs to; where it was taken out on purpose, "
                "start the worker anew"
            )

    async def _run(
        self,
        slot: Slot,
        code: str,
        limits: Limits,
        options: Sequence[str],
        load: LocalSnapshot | None,
        compile_: bool,
        tenant: str | None = None,
        *,
        may_wait: bool = True,
    ) -> Run:
        """``may_wait``: whether its header may be preloaded for it."""
        asked_s = time.monotonic()
        args = [*options, *(_COMPILE if compile_ else ())]
        can_fork = load is None and not any(each.startswith(_NOT_FORKED) for each in args)
        done: Finished | None = None
        told: Evaluated | None = None
        if can_fork:
            patience_s = _PATIENCE_SHARE * limits.wall_s if may_wait else 0.0
            done = await self._forked(slot, code, limits, args, tenant, patience_s)
            if done is not None and slot.sandbox is not None and slot.sandbox.watches:
                told = Evaluated.of(done.exit.reports)
            if done is not None and _is_doubtful(done.exit):
                done = None
                # What it evaluated there it evaluates in a new Lean, where nobody sees that.
                told = told if told is not None and told.free else None
        is_forked = done is not None
        if done is None:
            done = await self._started(slot, code, limits, args, load)
        begun_s = max(0.0, time.monotonic() - asked_s - done.exit.wall_s)
        # A link may lead to the worker's own files, and no verdict may tell of them.
        left = olean(slot)
        compiled = not compile_ or (not left.is_symlink() and left.is_file())
        run = await read_run(done, limits, compiled=compiled)
        return replace(
            run,
            spent=Spent(begun_us=round(begun_s * 1e6), is_forked=is_forked),
            evaluated=told,
        )

    async def _started(
        self,
        slot: Slot,
        code: str,
        limits: Limits,
        args: Sequence[str],
        load: LocalSnapshot | None,
    ) -> Finished:
        """Runs a Lean that starts for this text."""
        sandbox = slot.sandbox = await self._plain(slot)
        sandbox.clear()
        if load and sandbox.inbox:
            # If the disk has no room for it, Lean does the same more slowly.
            with contextlib.suppress(OSError):
                exposed = await asyncio.to_thread(load.expose, sandbox.inbox, _SNAPSHOT)
                args = [*args, f"--incr-load={exposed}"]
        return await self._lean(sandbox, self.command(args), limits, code)

    async def _forked(
        self,
        slot: Slot,
        code: str,
        limits: Limits,
        args: Sequence[str],
        tenant: str | None,
        patience_s: float,
    ) -> Finished | None:
        """Runs behind the text's header; None if it is not preloaded, or a thread is missing."""
        if self.forks is None:
            return None
        command = self.command(args)
        key = self.forks.key(code, command)
        if key is None:
            return None
        if tenant is not None and not await self.forks.may_share(key, code):
            tenant = None
        sandbox = slot.forked.get(key)
        if sandbox is None:
            sandbox = await self.forks.take(key, command, tenant, patience_s=patience_s)
        if sandbox is None:
            return None
        slot.sandbox, slot.command = sandbox, command
        slot.forked[key] = sandbox
        sandbox.clear()
        count("leanq_fork_server_total", "forked")
        try:
            done = await self._lean(sandbox, command, limits, code, tenant)
        except SandboxError as error:
            log.warning("a text runs once more, for its fork was lost: %s", error)
            await self.forks.give_back(key, slot.forked.pop(key), command)
            return None
        if done.exit.earlier:
            count("leanq_fork_server_total", "further")
        # A kill from outside, as when memory is short, says nothing of forks.
        was_stopped = done.exit.stopped is not None or done.exit.signal == signal.SIGKILL
        if not was_stopped and self.forks.comparisons.is_due():
            compiled = compiled_by(command, sandbox.left)
            seen = await asyncio.to_thread(RunBytes.of, done, compiled)
            is_further = done.exit.earlier > 0
            self.forks.comparisons.begin(key, command, code, limits, seen, is_further=is_further)
        return done

    async def try_imports(self, header: str) -> tuple[str, bool]:
        """Has Lean import a header alone. Returns why it cannot read a library, "" if it can, and
        whether it lacks a module. Raises ToolchainError if it does not work any more."""
        done = await self._asked(f"{header}\n")
        end = done.exit
        # A kill from outside, as when memory is short, says nothing of a library.
        if end.stopped is None and end.code not in (0, 1) and end.signal != signal.SIGKILL:
            await self.prove()
            return (
                f"it dies of {signal_name(end.signal)}" if end.signal else f"it dies: {end}",
                False,
            )
        said = Printed(done.stdout).messages
        unread = (message.text for message in said if UNREADABLE.search(message.text))
        return next(unread, ""), any(unknown_imports(said))

    async def _asked(self, source: str) -> Finished:
        async with self.slot() as slot:
            sandbox = await self._plain(slot)
            return await self._lean(sandbox, self.command(), _ASK_LIMITS, source)

    async def ask(self, source: str) -> str:
        """Returns Lean's output about a source of ours. Raises ToolchainError if Lean does not work
        on this machine any more, and SandboxError if it says nothing."""
        done = await self._asked(source)
        if done.exit.code not in (0, 1):
            await self.prove()
            raise SandboxError(f"Lean could not be asked for axioms: {done.exit}")
        if done.exit.code:
            await self._look_for(unknown_imports(Printed(done.stdout).messages))
        return done.stdout.decode(errors="replace")

    def command(self, args: Sequence[str] = ()) -> list[str]:
        """Returns the command that reads a text from standard input."""
        return self.environment.command(self._known(args))

    def _known(self, args: Sequence[str]) -> list[str]:
        """Returns the arguments without those at which an older Lean would end with an error."""
        knows = self.environment.toolchain.has_weak_options
        return [each for each in args if knows or not each.startswith("-Dweak.")]

    async def _plain(self, slot: Slot) -> Sandbox:
        """Returns the slot's sandbox in which Lean starts: an idle one that is alive, or a new
        one."""
        while slot.plain is None and self.idle:
            sandbox = self.idle.pop()
            if sandbox.alive:
                slot.plain = sandbox
            else:
                await sandbox.close()
        if slot.plain is None:
            slot.plain = await self._new_sandbox()
        return slot.plain

    async def _lean(
        self,
        sandbox: Sandbox,
        command: Sequence[str],
        limits: Limits,
        text: str,
        tenant: str | None = None,
    ) -> Finished:
        env, stdin = self.environment.sandbox_env(sandbox.scratch), text.encode()
        return await sandbox.run(command, env=env, limits=limits, stdin=stdin, tenant=tenant)

    async def _new_sandbox(self) -> Sandbox:
        return await Sandbox.open(
            readable=self.environment.readable(),
            hidden=self.hidden,
            nice=self.nice,
            inbox_root=self.inbox_root,
        )

    async def _try_lean(self) -> None:
        environment = self.environment
        try:
            async with self.slot() as slot:
                text = environment.header_for(_TRIAL) + _TRIAL
                # Candidates need memory and processors more than the header of this one.
                run = await self._run(slot, text, _ASK_LIMITS, (), None, True, may_wait=False)
        except SandboxError as error:
            raise self._broken(str(error)) from error
        outcome = run.outcome
        if outcome.verdict != "accepted":
            said = "; ".join(message.text for message in outcome.messages if message.text)
            raise self._broken(said or str(outcome.verdict))

    def _broken(self, came: str) -> ToolchainError:
        toolchain, name = self.environment.toolchain, self.environment.name
        return ToolchainError(
            f"{toolchain} does not work in the sandbox: a theorem of one line in the environment "
            f"{name!r} came to: {' '.join(came.split())[-1000:]}. It can read its own prefix, the "
            "libraries and the system's folders there. Repair or reinstall it, name the program "
            "itself with --lean or LEANQ_LEAN and not a wrapper, and look with: leanq doctor"
        )


def _is_doubtful(end: Exit) -> bool:
    """Returns whether a Lean that starts for the text alone has to run it again. A fork may have
    died as a fork, or waited for a thread that no fork has. One that worked, or waited for nothing
    but a processor, would cost as much again. So has any end that earlier texts of a fork may have
    a part in; CPU time is a text's own."""
    if end.earlier and (end.stopped not in (None, "cpu", "killed") or end.code not in (0, 1, None)):
        return True
    if end.stopped == "wall":
        return end.waited_s >= _WAITING_SHARE * end.wall_s
    return end.stopped is None and end.signal is not None


async def read_run(done: Finished, limits: Limits, *, compiled: bool) -> Run:
    """Returns the run that came to this end."""
    at_once = len(done.stdout) < _PRINTED_AT_ONCE_BYTES
    return Run(done, limits, await run_apart(Printed, done.stdout, at_once=at_once), compiled)


def olean(slot: Slot) -> Path:
    """Returns where a run leaves its compiled result."""
    return slot.left / f"{MODULE}.olean"


def limits_of(request: Request, factor: float = 1.0) -> Limits:
    """Returns a request's budgets, with ``factor`` times its times."""
    return Limits(
        cpu_s=factor * request.timeout_s,
        wall_s=factor * request.wall_s,
        memory_bytes=request.memory_mb << 20,
        scratch_bytes=request.scratch_mb << 20,
    )
