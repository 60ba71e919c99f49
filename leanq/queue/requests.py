"""Requests and replies, and the words that stand in them.

They are records of msgspec's: their declarations are also how they are read from the wire, with the
type of each field checked (:mod:`leanq.queue.wire`). ``msgspec.structs.replace`` makes copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, force_setattr, replace

from leanq.errors import InvalidRequestError, NoRewardError

VERSION = 1
"""The version of requests and replies on the wire."""

MAX_TIMEOUT_S = 86_400.0

TIMEOUT_S, MEMORY_MB, SCRATCH_MB = (0.01, MAX_TIMEOUT_S), (16, 1 << 24), (1, 1 << 24)
"""The least and the most that a request may be given: CPU time, memory, scratch disk."""

Operation = Literal["check", "verify", "step", "export", "import", "echo"]
Verdict = Literal[
    "accepted",
    "unverified",
    "incomplete",
    "rejected",
    "exhausted",
    "unjudged",
    "timeout",
    "memory",
    "crashed",
    "cancelled",
    "poisoned",
    "expired",
]
Reason = Literal[
    "unknown_import",
    "lean_error",
    "not_read_to_end",
    "sorry",
    "goals_remain",
    "forbidden_axiom",
    "kernel_refused",
    "reserved_name",
    "statement_differs",
    "runs_programs",
    "heartbeats",
    "recursion_depth",
    "cpu_time",
    "wall_time",
    "memory",
    "scratch",
    "process_died",
    "judge_limit",
    "judge_unavailable",
    "not_audited",
    "trusted_step",
    "withdrawn",
    "deadline",
    "too_many_deaths",
]
"""Why a verdict is not ``accepted``."""

Rule = Literal[
    "missing",  # the candidate does not declare it
    "kind_differs",  # a definition or an axiom for a theorem, say
    "type_differs",
    "levels_differ",  # other universe parameters
    "definition_differs",  # what the statement reaches has another value, or other constructors
    "safety_differs",  # unsafe or partial in the candidate alone
    "redeclared",  # the target imports it, and the candidate declares it
    "import_missing",  # the target imports a module that the candidate does not
    "overridden",  # compiled as another program (``implemented_by``, …) in the candidate alone
    "axiom",  # an axiom that the caller allows, of the candidate's own making
    "hole_not_named",  # a definition whose value is a sorry, and that is not named as a hole
    "hole_uses_theorem",  # what fills a hole leads to a theorem that is to be proved
    "target_lacks",  # the target does not declare a theorem that is asked for
    "target_unread",  # Lean has not read the target to its end
]
"""Why a candidate does not state what its target states."""

Severity = Literal["information", "warning", "error"]

Infotree = Literal["full", "tactics", "original", "substantive"]
"""Which nodes of the tree in which Lean notes how it has elaborated a text: all; tactics; what the
text itself says; what is no mere structure. In the words of the Lean REPL."""

MAX_INFOTREE_BYTES = 4 << 20
"""The largest such tree in a reply."""

Way = Literal["warm", "cold", "replayed", "failed"]
"""How Lean came by what a text with holes begins with: by a snapshot from the disk, by one
from the server, by elaborating it, or by this because the snapshot could not be used."""

LEAN_NO = frozenset({"unverified", "incomplete", "rejected", "exhausted"})
"""Verdicts of Lean and the judge that a candidate has earned no reward by."""

LEAN_VERDICTS = LEAN_NO | {"accepted"}
"""Verdicts of Lean and the judge: the same on any machine, and the only ones that may be
remembered. All others are leanq's and say nothing about the proof."""

PRIORITIES = 3
"""Priorities run from 0, the most urgent, to ``PRIORITIES - 1``."""

# A check compiles, perhaps once more under names of ours, asks for axioms, and looks at the holes;
# a step tries, perhaps once more without a snapshot, and looks at holes or ends as a check.
# A verification checks the candidate, compiles the target, and compares the two.
_LEAN_RUNS: Mapping[Operation, int] = {"check": 7, "verify": 12, "step": 9}
# A gateway with keys adds a seal, by which it knows the tenant that the state was given to.
_STATE = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{32})?")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


_TIMEOUT_S, _WALL_S, _MEMORY_MB, _SCRATCH_MB, _DELAY_S = 60.0, 360.0, 4096, 256, 0.0
_NUMBERS: tuple[tuple[str, float, str, tuple[float, float], str], ...] = (
    ("timeout_s", _TIMEOUT_S, "timeout", TIMEOUT_S, "CPU seconds"),
    ("wall_s", _WALL_S, "wall time", (0.01, 10 * MAX_TIMEOUT_S), "seconds"),
    ("memory_mb", _MEMORY_MB, "memory", MEMORY_MB, "MB"),
    ("scratch_mb", _SCRATCH_MB, "scratch disk", SCRATCH_MB, "MB"),
    ("delay_s", _DELAY_S, "delay", (0, MAX_TIMEOUT_S), "seconds"),
)
"""Fields of a request that are numbers: the default, what they are called, and their limits."""


class Request(Struct, frozen=True, tag_field="v", tag=VERSION, omit_defaults=True):
    """What a client asks of a worker.

    Attributes:
        op: the operation.
        code: Lean source (check), or the candidate (verify).
        target: Lean source whose proofs are ``sorry``, which the candidate has to prove (verify).
        theorems: instead of a target, names in the environment to be proved (verify).
        holes: names in the target whose values the candidate may choose (verify).
        state: the state's id, with a gateway's seal on the way there (step, export).
        tactic: what is tried on its goals (step).
        payload: bytes that come back (echo), or an exported state (import).
        delay_s: how long the echo takes, in seconds.
        timeout_s: budget of CPU time, in seconds, of Lean with all its descendants.
        wall_s: budget of wall time, in seconds; the backstop for a Lean that waits.
        memory_mb: resident memory, in MiB.
        scratch_mb: disk that the candidate's processes may fill, in MiB.
        allow_axioms: names of axioms allowed beside the environment's own.
        audit: whether what Lean accepts is judged and audited.
        trust_programs: whether the caller vouches for a text that runs programs of its own.
        traceparent: the caller's trace context as W3C writes it, for the worker's log.
        infotree: which nodes of the text's infotree the reply is to have (check); "" for none.
    """

    op: Operation
    code: str = ""
    state: str = ""
    tactic: str = ""
    payload: bytes = b""
    delay_s: float = _DELAY_S
    timeout_s: float = _TIMEOUT_S
    wall_s: float = _WALL_S
    memory_mb: int = _MEMORY_MB
    allow_axioms: tuple[str, ...] = ()
    audit: bool = True
    traceparent: str = ""
    target: str = ""
    theorems: tuple[str, ...] = ()
    holes: tuple[str, ...] = ()
    trust_programs: bool = False
    scratch_mb: int = _SCRATCH_MB
    infotree: Infotree | Literal[""] = ""

    def __post_init__(self) -> None:
        if self.traceparent and not _TRACEPARENT.fullmatch(self.traceparent):
            raise InvalidRequestError(
                f"{self.traceparent!r:.80} is not a traceparent; expected one such as "
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            )
        # Numbers that were left out are the defaults themselves, and within their limits.
        if not (
            self.timeout_s is _TIMEOUT_S
            and self.wall_s is _WALL_S
            and self.memory_mb is _MEMORY_MB
            and self.scratch_mb is _SCRATCH_MB
            and self.delay_s is _DELAY_S
        ):
            self._check_numbers()
        op = self.op
        if op == "check":
            if not self.code.strip():
                raise InvalidRequestError("there is no Lean code to check: the text is empty")
        elif op == "verify":
            self._check_verify()
        elif op == "step" or op == "export":
            self._check_step()
        if self.infotree and self.op != "check":
            raise InvalidRequestError(
                f"a {self.op} has no infotree; ask for one with a check of the text"
            )
        if "\0" in self.code or "\0" in self.tactic or "\0" in self.target:
            raise InvalidRequestError("the text contains a NUL character, so it is not Lean code")

    def _check_numbers(self) -> None:
        for name, default, what, (least, most), unit in _NUMBERS:
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequestError(
                    f"{what} must lie between {least:.10g} and {most:.10g} {unit}, got {value:.10g}"
                )
            if value == default and value is not default:
                # msgspec omits only the default itself, and equal requests must have equal bytes.
                force_setattr(self, name, default)

    def _check_step(self) -> None:
        if self.op == "step" and not self.tactic.strip():
            raise InvalidRequestError("there is no tactic to run: the text is empty")
        if not _STATE.fullmatch(self.state):
            raise InvalidRequestError(
                f"{self.state!r:.80} is not a state; expected 64 hexadecimal digits"
            )

    def _check_verify(self) -> None:
        if not self.code.strip():
            raise InvalidRequestError("there is no candidate to verify: the text is empty")
        if bool(self.target.strip()) == bool(self.theorems):
            raise InvalidRequestError(
                "verify needs a target text or names of theorems, and not both; "
                f"got {len(self.target)} characters of text and {len(self.theorems)} names"
            )

    @property
    def longest_run_s(self) -> float:
        """After how many seconds a worker that still runs the request must be stuck."""
        return self.delay_s + _LEAN_RUNS.get(self.op, 0) * self.wall_s + 60


def wall_for(timeout_s: float) -> float:
    """The wall budget in seconds that goes with a CPU budget: generous, so that an
    overloaded machine gives the verdict of an idle one."""
    return 5 * timeout_s + 60


class Message(Struct, frozen=True, array_like=True):
    """One message of Lean's: lines from 1, columns from 0 in code points, as Lean counts."""

    severity: Severity
    line: int
    column: int
    text: str
    end_line: int | None = None
    end_column: int | None = None


class Sorry(Struct, frozen=True, array_like=True):
    """An open goal: where it stands, the goal as Lean prints it, and its state's id.

    Lines count from 1, columns from 0 in code points; the end may be unknown.
    """

    line: int
    column: int
    goal: str | None = None
    state: str | None = None
    end_line: int | None = None
    end_column: int | None = None


class Theorem(Struct, frozen=True, array_like=True):
    """A theorem that a text adds; of a verification, one of the target's.

    Attributes:
        name: its full name.
        statement: what it states, in Lean's words and by the notation of the text's imports alone.
            Long ones end in an ellipsis; "" where it is too large, or not among the first 20.
    """

    name: str
    statement: str


class Failure(Struct, frozen=True, array_like=True):
    """Why a candidate does not prove one theorem of its target.

    Attributes:
        name: the theorem's full name, or another name of the target.
        rule: the rule that it fails, one of the words of :data:`Rule`.
        text: what was expected and what came, for people.
    """

    name: str
    rule: str
    text: str


class Reply(Struct, frozen=True, omit_defaults=True, eq=False):
    """How a request ended.

    Two are equal where Lean's answers are, whichever worker gave them and after what time.

    Attributes:
        verdict: Lean's answer or the infrastructure's; ``None`` for an echo.
        reason: why the verdict is what it is; ``None`` for ``accepted``, unless the caller vouched
            for a text that runs programs.
        theorems: the theorems that a checked text adds, in their order; none where the judge did
            not look at it, as with an error or a ``sorry`` that Lean reports.
        failed: which theorems of the target a candidate does not prove, and why (verify).
        axioms: all axioms that the new constants rest on; ``None`` where not audited.
        kernel: the version of the Lean whose kernel judged; ``None`` where none did.
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
        content: by which a request is known that comes again, see :func:`content_of`; "" where
            nothing is known of it.
        way: the same of how Lean came by what a step's text begins with.
        infotree: what the request asked for of it, as JSON in UTF-8 and in the REPL's shape; at
            most ``MAX_INFOTREE_BYTES``.
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
    request_id: str = ""
    worker: str = ""
    attempts: int = 0
    queued_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    audit_s: float = 0.0
    warm: bool = False
    way: Way | None = None
    reason: Reason | None = None
    theorems: tuple[Theorem, ...] = ()
    failed: tuple[Failure, ...] = ()
    infotree: bytes | None = None
    content: str = ""
    kernel: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reply) and _answer(self) == _answer(other)

    def __hash__(self) -> int:
        return hash(_answer(self))


_OF_ITS_RUN = ("request_id", "worker", "attempts", "queued_s", "cpu_s", "wall_s", "audit_s")
_OF_ITS_WORKER = ("warm", "way", "content")
_answer = attrgetter(*(set(Reply.__struct_fields__) - {*_OF_ITS_RUN, *_OF_ITS_WORKER}))


def content_of(environment: str, digest: str) -> str:
    """Returns what two requests of one id have in common if they ask for the same.

    Args:
        environment: where it is asked.
        digest: of what is asked; "" for an echo, which may be any.
    """
    return f"{digest} {environment}" if digest else ""


def without_infotree(reply: Reply, why: str) -> Reply:
    """The reply to a check, which stands whatever becomes of the infotree that was asked for."""
    note = Message("warning", 1, 0, f"leanq: there is no infotree: {why}")
    # In front, since the last of leanq's messages is about the verdict.
    return replace(reply, infotree=None, messages=(note, *reply.messages))


def reward(verdict: Verdict | None) -> float:
    """What a candidate has earned: 1 for ``accepted``, 0 for what Lean or the judge refused.

    >>> [reward(verdict) for verdict in ("accepted", "rejected", "incomplete")]
    [1.0, 0.0, 0.0]
    >>> reward("timeout")
    Traceback (most recent call last):
        ...
    leanq.errors.NoRewardError: timeout says nothing about the proof, so it earns neither 1 nor 0...

    Raises:
        NoRewardError: for every other verdict, which says nothing about the proof.
    """
    if verdict == "accepted":
        return 1.0
    if verdict in LEAN_NO:
        return 0.0
    raise NoRewardError(
        f"{verdict or 'no verdict'} says nothing about the proof, so it earns neither 1 nor 0; "
        "submit the candidate again or leave it out"
    )


def check_reply_to_json(reply: Reply) -> dict[str, Any]:
    """The reply to a check, in values that JSON has.

    Fields of other operations, or for the worker alone, are left out.
    """
    return {
        "request_id": reply.request_id,
        "verdict": reply.verdict,
        "reason": reply.reason,
        "messages": [asdict(message) for message in reply.messages],
        "sorries": [asdict(sorry) for sorry in reply.sorries],
        "theorems": [asdict(theorem) for theorem in reply.theorems],
        "axioms": None if reply.axioms is None else list(reply.axioms),
        "kernel": reply.kernel,
        "attempts": reply.attempts,
        "worker": reply.worker,
        "queued_s": round(reply.queued_s, 4),
        "cpu_s": round(reply.cpu_s, 4),
        "wall_s": round(reply.wall_s, 4),
    }


def step_reply_to_json(reply: Reply) -> dict[str, Any]:
    """The reply to a step, in values that JSON has."""
    return {
        "verdict": reply.verdict,
        "reason": reply.reason,
        "state": reply.state,
        "goals": list(reply.goals),
        "messages": [asdict(message) for message in reply.messages],
    }


def verify_reply_to_json(reply: Reply) -> dict[str, Any]:
    """The reply to a verification: as a check's, and which theorems failed by which rule."""
    return {**check_reply_to_json(reply), "failed": [asdict(failure) for failure in reply.failed]}
