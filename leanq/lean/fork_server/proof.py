"""Proves that Lean behind a preloaded header says just what a newly started Lean says."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from leanq.lean.diagnostics import Printed
from leanq.lean.environment import Environment
from leanq.lean.pass_memory import PassMemory, libraries_of
from leanq.lean.sandbox.sandbox import Finished, Limits

PROOF_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=8 << 30)
# Of compiled files; a larger one is compared by its size and its beginning.
_COMPARED_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_THEOREM = "theorem leanqProof (p : Prop) (h : p) : p := "
_DEEP = 20_000
_SMALL_STACK = {"LEAN_STACK_SIZE_KB": "4096"}


@dataclass(frozen=True, slots=True)
class Trial:
    """A text of the proof, and additional environment variables for it."""

    text: str
    env: Mapping[str, str] = field(default_factory=dict)


BARE_HEADER = "prelude\n"
"""It imports nothing, so Lean starts behind it in a tenth of the time."""

_ACCEPTED, _REFUSED = f"{_THEOREM}h\n", f"{_THEOREM}p\n"
_UNFINISHED, _UNREADABLE = f"{_THEOREM}sorry\n", "theorem leanqProof : := by (\n"
# A stack that overflows: one of the usual size would take seconds and a gigabyte.
_OVERFLOWING = f"{_THEOREM}{'(' * _DEEP}h{')' * _DEEP}\n"
# Lines that may stand in and above a header with the same imports.
_ABOVE = "-- a remark\n/- one /- in another -/ é -/\r\n  "
_BETWEEN = "  -- another remark\n\n  /-/ /- -/ -/"
# A text with another header, which a fork has to import anew.
_OTHER_HEADER = f"module\nprelude\n\n-- another header\n{_ACCEPTED}"


@dataclass(frozen=True, slots=True)
class RunBytes:
    """Everything that a run of Lean leaves behind."""

    code: int | None
    signal: int | None
    stopped: str | None
    stdout: bytes
    stderr: bytes
    compiled: bytes

    @classmethod
    def of(cls, done: Finished, compiled: Path | None) -> RunBytes:
        """Returns what a run has left, with its compiled file, if it has one."""
        end = done.exit
        digest = _digest(compiled) if compiled else b""
        return cls(end.code, end.signal, end.stopped, done.stdout, done.stderr, digest)

    @property
    def exhausted(self) -> bool:
        """True if a deterministic budget of Lean's ran out."""
        return Printed(self.stdout).exhausted

    @property
    def was_ended(self) -> bool:
        """True if it did not end by itself, as when the machine is short of memory."""
        return self.stopped is not None or self.signal == signal.SIGKILL

    def difference(self, other: RunBytes) -> str:
        """Returns the difference of two runs; empty if they are the same, byte for byte."""
        names = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        return ", ".join(names)


def _digest(path: Path) -> bytes:
    """Returns the hash of a candidate's file; empty if there is none. The file may be huge, or no
    file of its own."""
    left = _COMPARED_BYTES
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return b""
            digest = sha256(str(status.st_size).encode())
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError:
        return b""
    return digest.digest()


def memory_of(environment: Environment, header: str, command: Sequence[str]) -> PassMemory:
    """Returns where a header's pass is remembered, for Lean with these arguments."""
    words = (environment.fingerprint, header, *command)
    return PassMemory(environment, "fork-server", libraries_of(environment), *words)


def header_trials(header: str) -> tuple[Trial, ...]:
    """Returns the texts that prove a preloaded header on a machine on which forks work."""
    with_remarks = f"{_ABOVE}{header.replace(chr(10), _BETWEEN)}\n{_REFUSED}"
    return Trial(header + _ACCEPTED), Trial(with_remarks)


MACHINE_TRIALS = (
    *header_trials(BARE_HEADER),
    *(Trial(BARE_HEADER + body) for body in (_UNFINISHED, _UNREADABLE)),
    Trial(_OTHER_HEADER),
    Trial(f"{BARE_HEADER}{_OVERFLOWING}", _SMALL_STACK),
)
"""Yields the texts that show that forks work here; they stand behind ``BARE_HEADER``."""


def compiled_by(command: Sequence[str], scratch: Path) -> Path | None:
    """Returns where a command leaves its compiled result, if it leaves one."""
    return scratch / command[command.index("-o") + 1] if "-o" in command else None
