"""Proves that Lean behind a preloaded header says just what a newly started Lean says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from leanq.errors import SandboxError
from leanq.lean.environment import Environment
from leanq.lean.outcome import Printed
from leanq.lean.run.evaluators import evaluators
from leanq.lean.run.files import open_regular
from leanq.lean.run.pass_memory import PassMemory, libraries_of
from leanq.lean.run.programs import runs_programs
from leanq.lean.run.zygote_client import Zygote
from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox

PROOF_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=8 << 30)
# Of compiled files; a larger one is compared by its size and its beginning.
_COMPARED_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_THEOREM = "theorem leanqProof (p : Prop) (h : p) : p := "
_DEEP = 20_000
_MOST_NAMED_CHARS = 200
_SMALL_STACK = {"LEAN_STACK_SIZE_KB": "4096"}


Key = str
"""A header that a zygote has imported."""

SHARED = "shared"
"""Names the proof that one fork may serve several texts."""


@dataclass(frozen=True, slots=True)
class Trial:
    text: str
    env: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = ("-o", "Proof.olean")


BARE_HEADER = "prelude\n"
"""It imports nothing, so Lean starts behind it in a tenth of the time."""

_ACCEPTED, _REFUSED = f"{_THEOREM}h\n", f"{_THEOREM}p\n"
_UNFINISHED, _UNREADABLE = f"{_THEOREM}sorry\n", "theorem leanqProof : := by (\n"
# It is compiled, with a warning and a statement that Lean prints.
_TOLD = f"{_ACCEPTED}#check leanqProof\ntheorem leanqOpen (p : Prop) : p := sorry\n"
# A stack that overflows: one of the usual size would take seconds and a gigabyte.
_OVERFLOWING = f"{_THEOREM}{'(' * _DEEP}h{')' * _DEEP}\n"
# Lines that may stand in and above a header with the same imports.
_ABOVE = "-- a remark\n/- one /- in another -/ é -/\r\n  "
_BETWEEN = "  -- another remark\n\n  /-/ /- -/ -/"
# The warning of an unfinished proof is an error with them.
_OTHER_ARGS = ("-DwarningAsError=true", "-Dweak.no.such=1", "-i", "notes.ilean")
# A text with another header, which a fork has to import anew.
_OTHER_HEADER = f"module\nprelude\n\n-- another header\n{_ACCEPTED}"


@dataclass(frozen=True, slots=True)
class RunBytes:
    code: int | None
    signal: int | None
    stopped: str | None
    stdout: bytes
    stderr: bytes
    compiled: bytes

    @classmethod
    def of(cls, done: Finished, compiled: Path | None) -> RunBytes:
        end = done.exit
        digest = _digest(compiled) if compiled else b""
        return cls(end.code, end.signal, end.stopped, done.stdout, done.stderr, digest)

    @property
    def was_ended(self) -> bool:
        """True if it did not end by itself, as when the machine is short of memory."""
        return self.stopped is not None or self.signal == signal.SIGKILL

    def difference(self, other: RunBytes) -> str:
        """Returns the difference of two runs; empty if they are the same, byte for byte."""
        names = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        return ", ".join(names)


def _digest(path: Path) -> bytes:
    """Returns the hash of a candidate's file, which may be huge; empty if there is no plain one."""
    left = _COMPARED_BYTES
    try:
        with open_regular(path) as file:
            digest = sha256(str(os.fstat(file.fileno()).st_size).encode())
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError:
        return b""
    return digest.digest()


def memory_of(environment: Environment, key: Key, *of: str) -> PassMemory:
    """Returns the place of a header's pass; ``of`` names another proof than that of its forks."""
    words = (environment.fingerprint, key, *environment.command(), *of)
    return PassMemory(environment, "fork-server", libraries_of(environment), *words)


def _with_remarks(header: str, body: str) -> Trial:
    return Trial(f"{_ABOVE}{header.replace(chr(10), _BETWEEN)}\n{body}")


def header_trial(header: str) -> Trial:
    """Returns the text that proves a preloaded header on a machine on which forks work. It is one,
    since Lean has to start for it."""
    return _with_remarks(header, _TOLD)


MACHINE_TRIALS = (
    header_trial(BARE_HEADER),
    _with_remarks(BARE_HEADER, _REFUSED),
    *(Trial(BARE_HEADER + body) for body in (_ACCEPTED, _UNFINISHED, _UNREADABLE)),
    Trial(BARE_HEADER + _UNFINISHED, args=_OTHER_ARGS),
    Trial(_OTHER_HEADER),
    Trial(f"{BARE_HEADER}{_OVERFLOWING}", _SMALL_STACK),
)
"""Yields the texts that show that forks work here; they stand behind ``BARE_HEADER``."""


def sharing_trials(header: str) -> tuple[Trial, ...]:
    """Returns the texts that prove that one fork may serve several."""
    bodies = (_ACCEPTED, _REFUSED, _UNFINISHED)
    return tuple(_with_remarks(header, body) for body in bodies)


def compiled_by(command: Sequence[str], scratch: Path) -> Path | None:
    return scratch / command[command.index("-o") + 1] if "-o" in command else None


def says_otherwise(key: Key, different: str) -> str:
    return f"behind {short(key)} Lean says something else: {different}"


def short(key: Key) -> str:
    """Returns the header as the log names it."""
    return repr(textwrap.shorten(key, _MOST_NAMED_CHARS, placeholder=" …"))


class DiffersError(SandboxError):
    """Lean says something else in a fork."""


@dataclass(frozen=True)
class Prover:
    """Runs texts behind a header and by a newly started Lean, and compares all bytes."""

    environment: Environment
    hidden: Sequence[Path]
    nice: int

    async def prove_machine(self, *, anew: bool = False) -> None:
        """Proves that forks work here, behind a header without imports, which takes a tenth of the
        time. Raises SandboxError if no header can be preloaded here."""
        key = BARE_HEADER
        memory = memory_of(self.environment, key)
        if not anew and await asyncio.to_thread(memory.is_kept):
            return
        zygote = await self.new_zygote(key)
        try:
            await self.prove(key, zygote, MACHINE_TRIALS)
        finally:
            await zygote.close()
        await asyncio.to_thread(memory.keep)

    async def proved_zygote(self, key: Key) -> Zygote:
        """Starts a process that has imported a header, and proves it by a text that a new Lean
        reads meanwhile."""
        opening = asyncio.create_task(self.new_zygote(key))
        try:
            async with contextlib.AsyncExitStack() as stack:
                trial, plain = header_trial(key), await self.new_sandbox(stack)
                expected = await self.outcome(plain, trial, PROOF_LIMITS)
            await self.prove(key, await opening, [trial], expected)
        except BaseException:
            opening.cancel()
            [zygote] = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(zygote, Zygote):
                await zygote.close()
            raise
        return opening.result()

    async def prove(
        self, key: Key, zygote: Zygote, trials: Sequence[Trial], known: RunBytes | None = None
    ) -> None:
        """Raises DiffersError if a text comes out differently behind a header. ``known``: what a
        newly started Lean has said of the first one."""
        async with contextlib.AsyncExitStack() as stack:
            plain: Sandbox | None = None
            forked = await self.new_sandbox(stack, zygote)
            for trial in trials:
                behind = forked
                if trial.env:  # which Lean reads at its start
                    other = await self.new_zygote(key, trial.env)
                    stack.push_async_callback(other.close)
                    behind = await self.new_sandbox(stack, other)
                for _ in range(2):
                    if (expected := known) is None:
                        plain = plain or await self.new_sandbox(stack)
                        expected = await self.outcome(plain, trial, PROOF_LIMITS)
                    known = None
                    seen = await self.outcome(behind, trial, PROOF_LIMITS)
                    different = seen.difference(expected)
                    if not (seen.was_ended or expected.was_ended):
                        break
                if different:
                    raise DiffersError(says_otherwise(key, different))

    async def prove_sharing(self, key: Key, zygote: Zygote) -> None:
        """Raises DiffersError if a fork that serves a few texts, in one of three orders, says
        something else of one than a fork of its own, which is proved; or does not serve all."""
        async with contextlib.AsyncExitStack() as stack:
            alone = await self.new_sandbox(stack, zygote)
            pairs = [
                (trial, await self.outcome(alone, trial, PROOF_LIMITS))
                for trial in sharing_trials(key)
            ]
            for texts in (pairs, pairs[::-1], pairs[-1:] + pairs[:-1]):
                shared = await self.new_sandbox(stack, zygote)
                shared.shares = True
                for number, (trial, expected) in enumerate(texts):
                    if number and not shared.waits:
                        raise DiffersError(f"behind {short(key)} a fork serves one text only")
                    seen = await self.outcome(shared, trial, PROOF_LIMITS, tenant="")
                    if different := seen.difference(expected):
                        raise DiffersError(says_otherwise(key, different))

    async def is_header_wrong(self, key: Key) -> bool:
        """Returns whether a newly started Lean refuses a header, too."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                plain = await self.new_sandbox(stack)
                seen = await self.outcome(plain, Trial(key), PROOF_LIMITS)
            except (SandboxError, OSError):
                return True  # which tells nothing of forks
        return seen.code != 0

    def can_tell(self, code: str, *runs: RunBytes) -> bool:
        """Returns whether a text may say something else in a fork, though forks work."""
        found = evaluators(self.environment)
        return (
            any(Printed(each.stdout).exhausted for each in runs)
            or runs_programs(code, found) is not None
        )

    async def outcome(
        self, sandbox: Sandbox, trial: Trial, limits: Limits, *, tenant: str | None = None
    ) -> RunBytes:
        sandbox.clear()
        command = self.environment.command(trial.args)
        done = await sandbox.run(
            command,
            env={**self.environment.sandbox_env(sandbox.scratch), **trial.env},
            limits=limits,
            stdin=trial.text.encode(),
            tenant=tenant,
        )
        return await asyncio.to_thread(RunBytes.of, done, compiled_by(command, sandbox.left))

    async def new_zygote(self, key: Key, env: Mapping[str, str] | None = None) -> Zygote:
        """Starts a process that has imported a header, with these variables besides."""
        toolchain = self.environment.toolchain
        return await Zygote.open(
            toolchain.prefix and toolchain.prefix / "bin" / "lean",
            toolchain.shared_libraries,
            self.environment.command()[len(toolchain.command) :],
            key,
            {**self.environment.process_env(), **(env or {})},
        )

    async def open(self, zygote: Zygote | None) -> Sandbox:
        """Opens a sandbox behind a preloaded header, or one in which Lean starts anew."""
        sandbox = await Sandbox.open(
            readable=self.environment.readable(),
            hidden=self.hidden,
            nice=self.nice,
            scratch_root=zygote.scratch if zygote else None,
            start=zygote.fork if zygote else None,
        )
        sandbox.watches = zygote is not None and not zygote.unwatched
        return sandbox

    async def new_sandbox(
        self, stack: contextlib.AsyncExitStack, zygote: Zygote | None = None
    ) -> Sandbox:
        """Returns a sandbox for trials, for as long as the stack is open."""
        sandbox = await self.open(zygote)
        sandbox.counts = False
        stack.push_async_callback(sandbox.close)
        return sandbox
