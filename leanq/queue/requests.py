"""Requests and replies, and the words that they use.

They are msgspec records: each declaration also says how to read the record from the wire, with
every field's type checked (``leanq.queue.wire``). ``msgspec.structs.replace`` makes copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, force_setattr

from leanq.errors import InvalidRequestError, NoRewardError
from leanq.queue.settings import check_name

VERSION = 1
"""The version of requests and replies on the wire.

A new verdict or reason needs a new one: clients of before then say that a worker is newer.
"""

MAX_TIMEOUT_S = 86_400.0

TIMEOUT_S, MEMORY_MB, SCRATCH_MB = (0.01, MAX_TIMEOUT_S), (16, 1 << 24), (1, 1 << 24)
"""The least and the most of CPU time, memory and scratch disk that a request may have."""

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
    "kernels_disagree",
    "library_unreadable",
    "hole_open",
    "hole_uses_hole",
    "hole_left_out",
    "not_audited",
    "trusted_step",
    "withdrawn",
    "deadline",
    "too_many_deaths",
]
"""Reasons why a verdict is not ``accepted``."""

Rule = Literal[
    "missing",  # the candidate does not declare it
    "kind_differs",  # such as a definition or an axiom for a theorem
    "type_differs",
    "levels_differ",  # other universe parameters
    "definition_differs",  # a definition that the statement uses has another value or constructors
    "safety_differs",  # unsafe or partial in the candidate alone
    "redeclared",  # the target imports it, and the candidate declares it
    "import_missing",  # the target imports a module that the candidate does not
    "overridden",  # compiled as another program (``implemented_by``, …) in the candidate alone
    "axiom",  # an axiom that the caller allows, but that the candidate itself declares
    "hole_not_named",  # a definition whose value is a sorry, but that is not named as a hole
    "hole_uses_theorem",  # the value of a hole depends on a theorem to be proved
    "hole_open",  # what a hole states or holds rests on another hole, which is open
    "hole_uses_hole",  # what a hole holds rests on its own declaration, or on one behind it
    "hole_left_out",  # Lean keeps nothing of what a tactic proves in its hole
    "declared",  # a tactic beside other holes declares it by name
    "target_lacks",  # the target does not declare a theorem that is asked for
    "target_unread",  # Lean has not read the target to its end
]
"""Reasons why a candidate does not state what its target states."""

Severity = Literal["information", "warning", "error"]

MAX_GOALS_BYTES = 4 << 20
"""The most goals before tactics in a reply, in bytes of UTF-8."""

Way = Literal["warm", "cold", "replayed", "failed"]
"""How Lean got the beginning of a text with holes.

``warm``: from a snapshot on disk; ``cold``: from one in Redis; ``replayed``: by elaborating;
``failed``: by elaborating because the snapshot could not be used."""

LEAN_NO = frozenset({"unverified", "incomplete", "rejected", "exhausted"})
"""Verdicts of Lean and the judge that earn a candidate no reward."""

LEAN_VERDICTS = LEAN_NO | {"accepted"}
"""Verdicts of Lean and the judge: the same on any machine, and the only ones to remember.

All other verdicts are leanq's own and say nothing about the proof."""

PRIORITIES = 3
"""Priorities run from 0, the most urgent, to ``PRIORITIES - 1``."""

# A check compiles, perhaps again under names of leanq's own, asks for axioms, and looks at the
# holes. A step tries, perhaps again without a snapshot, and looks at holes or ends as a check. A
# verification checks the candidate, compiles the target, and compares the two.
_LEAN_RUNS: Mapping[Operation, int] = {"check": 7, "verify": 12, "step": 9}
# A gateway with keys adds a seal, which tells it the tenant that owns the state.
_STATE = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{32})?")
# Neither id is zero, and no version is ff.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


_TIMEOUT_S, _WALL_S, _MEMORY_MB, _SCRATCH_MB, _DELAY_S = 60.0, 360.0, 4096, 256, 0.0
_NUMBERS: tuple[tuple[str, float, str, tuple[float, float], str], ...] = (
    ("timeout_s", _TIMEOUT_S, "timeout", TIMEOUT_S, "CPU seconds"),
    ("wall_s", _WALL_S, "wall time", (0.01, 10 * MAX_TIMEOUT_S), "seconds"),
    ("memory_mb", _MEMORY_MB, "memory", MEMORY_MB, "MB"),
    ("scratch_mb", _SCRATCH_MB, "scratch disk", SCRATCH_MB, "MB"),
    ("delay_s", _DELAY_S, "delay", (0, MAX_TIMEOUT_S), "seconds"),
)
"""Fields of a request that are numbers: name, default, description, limits and unit."""


class Request(Struct, frozen=True, tag_field="v", tag=VERSION, omit_defaults=True):
    """A client's request to a worker.

    Attributes:
        op: the operation.
        code: Lean source (check), or the candidate (verify).
        target: Lean source whose proofs are ``sorry``, which the candidate has to prove (verify).
        theorems: instead of a target, names in the environment to be proved (verify).
        holes: names in the target whose values the candidate may choose (verify).
        state: the state's id, with a gateway's seal until it reaches the gateway (step, export).
        tactic: the tactic to run on its goals (step).
        payload: bytes to send back (echo), or an exported state (import).
        delay_s: how long the echo takes, in seconds.
        wall_s: budget of wall time, in seconds; it stops a Lean that waits.
        tenant: whose request it is; the worker sets it, whatever the client sent.

    For the others see ``leanq.Check`` and ``leanq.SubmitOptions``.
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
    statements: bool = True
    tenant: str = ""
    campaign: str = ""
    profile: bool = False
    goals: bool = False

    def __post_init__(self) -> None:
        if self.traceparent and not is_traceparent(self.traceparent):
            raise InvalidRequestError(
                f"{self.traceparent!r:.80} is not a traceparent; expected one such as "
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            )
        if self.campaign:
            check_name("campaign", self.campaign)
        # Omitted numbers are the defaults themselves, and within their limits.
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
        if self.goals and self.op not in ("check", "verify"):
            raise InvalidRequestError(
                f"a {self.op} does not tell the goals before tactics; ask for them with a check"
            )
        if self.profile and self.op != "check":
            raise InvalidRequestError(f"a {self.op} has no profile; ask for one with a check")
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
                # msgspec omits only the default object itself, and equal requests must have equal
                # bytes.
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
        """Returns after how many seconds a worker that still runs the request must be stuck."""
        # The text is read once more, and then the goals.
        runs = _LEAN_RUNS.get(self.op, 0) + 2 * self.goals
        return self.delay_s + runs * self.wall_s + 60


def is_traceparent(text: str) -> bool:
    """Returns whether a text is a trace context as W3C writes it."""
    return bool(_TRACEPARENT.fullmatch(text))


def wall_for(timeout_s: float) -> float:
    """Returns the wall budget for a CPU budget, both in seconds.

    It is generous, so that an overloaded machine gives the verdict of an idle one.
    """
    return 5 * timeout_s + 60


class Message(Struct, frozen=True, array_like=True):
    """One message from Lean: lines from 1, columns from 0 in code points, as Lean counts."""

    severity: Severity
    line: int
    column: int
    text: str
    end_line: int | None = None
    end_column: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether leanq added it, so that Lean did not print it."""
        return self.text.startswith("leanq: ")


class Sorry(Struct, frozen=True, array_like=True):
    """An open goal: its place, the goal as Lean prints it, and its state's id.

    Lines count from 1, columns from 0 in code points; the end may be unknown.
    """

    line: int
    column: int
    goal: str | None = None
    state: str | None = None
    end_line: int | None = None
    end_column: int | None = None


class Tactic(Struct, frozen=True, array_like=True):
    """A tactic of a text, and the goals before it as Lean prints them.

    Lines count from 1, columns from 0 in code points.
    """

    line: int
    column: int
    goals: tuple[str, ...]


class Theorem(Struct, frozen=True, array_like=True):
    """A theorem that a text adds; in a verification, one of the target's.

    Attributes:
        name: its full name.
        statement: what it states, in Lean's words and with the notation of the text's imports
            alone. A long one ends in an ellipsis. It is "" if it is too large, or not among the
            first 20; ``None`` if the request did not ask for statements.
    """

    name: str
    statement: str | None


class Failure(Struct, frozen=True, array_like=True):
    """Why a candidate does not prove one theorem of its target.

    Attributes:
        name: the theorem's full name, or another name of the target.
        rule: the rule that it breaks, one of ``Rule``.
        text: what was expected and what came, for people.
    """

    name: str
    rule: str
    text: str


class DeclarationTime(Struct, frozen=True, array_like=True):
    """The time that Lean spent on a declaration, or on another command of a text.

    Attributes:
        name: its full name. A command without a name has its beginning here, and one that
            declares several names has all of them.
        line: where it begins, from 1.
        ms: the time in milliseconds. Work on threads beside one another adds up.
        parts: what took most of it, with milliseconds.
    """

    name: str
    line: int
    ms: float
    parts: tuple[tuple[str, float], ...] = ()


class Profile(Struct, frozen=True, array_like=True):
    """Where Lean spent its time in a text.

    Attributes:
        declarations: the thousand that took longest, the longest first.
        import_ms: the time for the imports; None if unknown.
        unfinished: if Lean was stopped, the first declaration of which it had told nothing.
    """

    declarations: tuple[DeclarationTime, ...]
    import_ms: float | None = None
    unfinished: str = ""


class Spent(Struct, frozen=True, array_like=True):
    """Where the time of a request went, as far as its last worker knows.

    Attributes:
        kept_ms: the time-to-live of the reply, by which it tells when it was settled.
        claimed_ms: when the last attempt was claimed, in milliseconds since 1970 by the server's
            clock; 0 if it was not.
        held_us: from the claim's answer until the driver got it, in microseconds.
        begun_us: of the driver's time, until Lean had begun; in microseconds.
        is_forked: whether Lean began as a fork behind the header; None if it did not run for it.
        lost: earlier attempts, as ``lua/parts/requeue.lua`` writes them.
        traceparent: the trace context of the request that ran, as W3C writes it; "" unless its
            trace is sampled.
    """

    kept_ms: int = 0
    claimed_ms: int = 0
    held_us: int = 0
    begun_us: int = 0
    is_forked: bool | None = None
    lost: str = ""
    traceparent: str = ""


class Reply(Struct, frozen=True, omit_defaults=True, eq=False):
    """How a request ended.

    Two replies are equal if Lean's answers are, whichever worker gave them and after what time.

    Attributes:
        verdict: Lean's answer or the infrastructure's; ``None`` for an echo.
        reason: why the verdict is what it is; ``None`` for ``accepted``, unless the caller vouched
            for a text that runs programs.
        theorems: the theorems that a checked text adds, in their order. It is empty if the judge
            did not look at the text, as after an error or a ``sorry``.
        more_theorems: how many more there are, beyond the first 1,000.
        failed: which theorems of the target a candidate does not prove, and why (verify).
        axioms: all axioms that the new constants rest on; ``None`` if not audited.
        kernel: the version of the Lean whose kernel judged; ``None`` if none did.
        fingerprint: the environment in which Lean answered; ``None`` if Lean did not.
        state: the next state of a step, or the imported state; ``None`` once nothing is left to
            prove.
        goals: the open goals of the next state, as Lean prints them.
        payload: the bytes of an echo, or an exported state.
        error: why no worker could carry the request out; the client raises it.
        attempts: how many workers have taken the request up, this one included.
        queued_s, cpu_s, wall_s, audit_s: seconds in the queue, of CPU in Lean, on the worker, and
            of the audit alone (part of ``wall_s``).
        warm: whether requests with the same first affinity would be fast on this worker now. A
            driver tells its own worker; it is not sent.
        content: identifies a request that comes again, see ``content_of``; "" if unknown.
        way: how Lean got the beginning of a step's text; not sent either.
        tactics: the tactics of the text's proofs with the goals before each, if the request asked
            for them; at most ``MAX_GOALS_BYTES``.
        profile: where Lean spent its time, if the request asked for that.
        spent: where its time went; see ``leanq.fleet.timeline``.
        submitted_ms: when it was submitted, in milliseconds since 1970 by the server's clock; 0 if
            unknown. It stands last, where ``lua/parts/submit_time.lua`` finds it.
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
    tactics: tuple[Tactic, ...] = ()
    content: str = ""
    kernel: str | None = None
    spent: Spent | None = None
    profile: Profile | None = None
    more_theorems: int = 0
    submitted_ms: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reply) and _answer(self) == _answer(other)

    def __hash__(self) -> int:
        return hash(_answer(self))


_OF_ITS_RUN = (
    *("request_id", "worker", "attempts", "queued_s", "cpu_s", "wall_s", "audit_s"),
    *("spent", "submitted_ms", "profile"),
)
_OF_ITS_WORKER = ("warm", "way", "content")
_answer = attrgetter(*(set(Reply.__struct_fields__) - {*_OF_ITS_RUN, *_OF_ITS_WORKER}))


def content_of(environment: str, digest: str) -> str:
    """Returns the text that two requests of one id share if they ask for the same.

    Args:
        environment: the requests' environment.
        digest: the digest of the request; "" for an echo, which matches any other.
    """
    return f"{digest} {environment}" if digest else ""


def reward(verdict: Verdict | None) -> float:
    """Returns a candidate's reward: 1 for ``accepted``, 0 if Lean or the judge refused it.

    Examples:
        >>> [reward(verdict) for verdict in ("accepted", "rejected", "incomplete")]
        [1.0, 0.0, 0.0]
        >>> reward("timeout")
        Traceback (most recent call last):
            ...
        leanq.errors.NoRewardError: timeout says nothing about the proof, so it earns...

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


def _to_json(value: Any) -> Any:
    """Returns a value of a reply in values that JSON has; times in seconds to four digits."""
    if isinstance(value, DeclarationTime):
        return {**asdict(value), "parts": dict(value.parts)}
    if isinstance(value, Struct):
        return {name: _to_json(each) for name, each in asdict(value).items()}
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


CHECKED = (
    *("request_id", "verdict", "reason", "messages", "sorries", "theorems", "axioms", "kernel"),
    *("attempts", "worker", "queued_s", "cpu_s", "wall_s"),
)
"""The fields that a reply to a check has as JSON."""

WITH_GOALS = (*CHECKED, "tactics")
PROFILED = ("request_id", "verdict", "reason", "profile", "messages", "cpu_s", "wall_s")
VERIFIED = (*CHECKED, "failed")
OVER_HTTP = (*VERIFIED, "state", "goals", "fingerprint", "audit_s", "profile")
STEPPED = ("verdict", "reason", "state", "goals", "messages", "cpu_s", "wall_s")


def reply_to_json(reply: Reply, fields: Iterable[str]) -> dict[str, Any]:
    """Returns these fields of a reply in this order, in values that JSON has. Where theorems are
    left out, ``more_theorems`` says how many."""
    found = {name: _to_json(getattr(reply, name)) for name in fields}
    if reply.more_theorems and "theorems" in found:
        found["more_theorems"] = reply.more_theorems
    return found
