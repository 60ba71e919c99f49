"""Requests and replies as values, and the words that stand in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, dataclass_transform

from leanq.errors import InvalidRequestError

MAX_TIMEOUT_S = 86_400.0

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[_T]) -> type[_T]:
    """A dataclass that nobody changes, as type checkers make sure. They alone do: what a frozen one
    does at run time makes it cost eight times as much, and a request passes as seven values."""
    return dataclass(slots=True, unsafe_hash=True)(kind)


Operation = Literal["check", "step", "export", "import", "echo"]
Verdict = Literal[
    "accepted",
    "incomplete",
    "rejected",
    "exhausted",
    "timeout",
    "memory",
    "crashed",
    "cancelled",
    "poisoned",
    "expired",
]
Severity = Literal["information", "warning", "error"]

Way = Literal["warm", "cold", "replayed", "failed"]
"""How Lean came by what a text with holes begins with: by a snapshot from the disk, by one
from the server, by elaborating it, or by this because the snapshot could not be used."""

LEAN_VERDICTS = frozenset({"accepted", "incomplete", "rejected", "exhausted"})
"""Verdicts that Lean gives: the same on any machine, and the only ones that may be remembered."""

PRIORITIES = 3
"""Priorities run from 0, the most urgent, to ``PRIORITIES - 1``."""

# A check compiles, perhaps once more under names of ours, asks for axioms, and looks at the holes;
# a step tries, perhaps once more without a snapshot, and looks at holes or ends as a check.
_LEAN_RUNS: Mapping[Operation, int] = {"check": 7, "step": 9}
_STATE = re.compile(r"[0-9a-f]{64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@value
class Request:
    """What a client asks of a worker.

    Attributes:
        op: the operation.
        code: Lean source (check).
        state: the state's id (step, export).
        tactic: what is tried on its goals (step).
        payload: bytes that come back (echo), or an exported state (import).
        delay_s: how long the echo takes, in seconds.
        timeout_s: budget of CPU time, in seconds, of Lean with all its descendants.
        wall_s: budget of wall time, in seconds; the backstop for a Lean that waits.
        memory_mb: resident memory, in MiB.
        allow_axioms: names of axioms allowed beside the environment's own.
        audit: whether what Lean accepts is audited.
        replay: whether the kernel also replays what Lean accepts.
        traceparent: the caller's trace context as W3C writes it, for the worker's log.
    """

    op: Operation
    code: str = ""
    state: str = ""
    tactic: str = ""
    payload: bytes = b""
    delay_s: float = 0.0
    timeout_s: float = 60.0
    wall_s: float = 360.0
    memory_mb: int = 4096
    allow_axioms: tuple[str, ...] = ()
    audit: bool = True
    replay: bool = False
    traceparent: str = ""

    def __post_init__(self) -> None:
        if self.traceparent and not _TRACEPARENT.fullmatch(self.traceparent):
            raise InvalidRequestError(
                f"{self.traceparent!r:.80} is no traceparent; one looks like "
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            )
        _within("timeout", self.timeout_s, 0.01, MAX_TIMEOUT_S, "CPU seconds")
        _within("wall time", self.wall_s, 0.01, 10 * MAX_TIMEOUT_S, "seconds")
        _within("memory", self.memory_mb, 16, 1 << 24, "MB")
        _within("delay", self.delay_s, 0, MAX_TIMEOUT_S, "seconds")
        if self.op == "check" and not self.code.strip():
            raise InvalidRequestError("there is no Lean code to check: the text is empty")
        if self.op == "step" and not self.tactic.strip():
            raise InvalidRequestError("there is no tactic to run: the text is empty")
        if self.op in ("step", "export") and not _STATE.fullmatch(self.state):
            raise InvalidRequestError(f"{self.state!r:.80} is no state: 64 hexadecimal digits")
        if "\0" in self.code or "\0" in self.tactic:
            raise InvalidRequestError("the text contains a NUL character, so it is no Lean code")

    @property
    def longest_run_s(self) -> float:
        """After how many seconds a worker that still runs the request must be stuck."""
        return self.delay_s + _LEAN_RUNS.get(self.op, 0) * self.wall_s + 60


def wall_for(timeout_s: float) -> float:
    """The wall budget in seconds that goes with a CPU budget: generous, so that an
    overloaded machine gives the verdict of an idle one."""
    return 5 * timeout_s + 60


@value
class Message:
    """One message of Lean's: lines from 1, columns from 0 in code points, as Lean counts."""

    severity: Severity
    line: int
    column: int
    text: str
    end_line: int | None = None
    end_column: int | None = None


@value
class Sorry:
    """An open goal: where it stands, the goal as Lean prints it, and its state's id."""

    line: int
    column: int
    goal: str | None = None
    state: str | None = None


@value
class Reply:
    """How a request ended.

    Attributes:
        verdict: Lean's answer or the infrastructure's; ``None`` for an echo.
        axioms: all axioms that the new constants rest on; ``None`` where not audited.
        fingerprint: the environment in which Lean answered; ``None`` if Lean did not.
        state: the next state of a step, ``None`` once nothing is left to prove; or the state that
            was imported.
        goals: the open goals of the next state, as Lean prints them.
        payload: what an echo brought back, or an exported state.
        error: why no worker could carry the request out; the client raises it.
        attempts: how many workers have taken the request up, this one included.
        queued_s, cpu_s, wall_s, audit_s: seconds in the queue, of CPU in Lean, on the
            worker, and of the audit alone (part of ``wall_s``).
        warm: a driver's word to its own worker, which is not sent: others with the same first
            affinity would be fast here now.
        way: the same of how Lean came by what a step's text begins with.
    """

    verdict: Verdict | None = None
    messages: tuple[Message, ...] = ()
    sorries: tuple[Sorry, ...] = ()
    axioms: tuple[str, ...] | None = None
    fingerprint: str | None = None
    state: str | None = None
    goals: tuple[str, ...] = ()
    payload: bytes | None = None
    error: str | None = None
    request_id: str = field(default="", compare=False)
    worker: str = field(default="", compare=False)
    attempts: int = field(default=0, compare=False)
    queued_s: float = field(default=0.0, compare=False)
    cpu_s: float = field(default=0.0, compare=False)
    wall_s: float = field(default=0.0, compare=False)
    audit_s: float = field(default=0.0, compare=False)
    warm: bool = field(default=False, compare=False)
    way: Way | None = field(default=None, compare=False)


def check_reply_to_json(reply: Reply) -> dict[str, Any]:
    """What is told of a check's reply, in values that JSON has.

    What belongs to other operations, or to the worker alone, is no part of it.
    """
    return {
        "verdict": reply.verdict,
        "messages": [_message_to_json(message) for message in reply.messages],
        "sorries": [_sorry_to_json(sorry) for sorry in reply.sorries],
        "axioms": None if reply.axioms is None else list(reply.axioms),
        "fingerprint": reply.fingerprint,
        "request_id": reply.request_id,
        "worker": reply.worker,
        "attempts": reply.attempts,
        "queued_s": reply.queued_s,
        "cpu_s": reply.cpu_s,
        "wall_s": reply.wall_s,
        "audit_s": reply.audit_s,
    }


def _message_to_json(message: Message) -> dict[str, Any]:
    return {
        "severity": message.severity,
        "line": message.line,
        "column": message.column,
        "text": message.text,
        "end_line": message.end_line,
        "end_column": message.end_column,
    }


def _sorry_to_json(sorry: Sorry) -> dict[str, Any]:
    return {"line": sorry.line, "column": sorry.column, "goal": sorry.goal, "state": sorry.state}


def _within(what: str, value: float, least: float, most: float, unit: str) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(
            f"{what} is {value:g} {unit}; it must lie between {least:g} and {most:g}"
        )
