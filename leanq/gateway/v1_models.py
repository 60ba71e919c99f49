"""The bodies and results of leanq's own interface, for Pydantic and for its description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from leanq.gateway.bodies import Bounds
from leanq.queue.requests import VERIFIED, Reason, Reply, Verdict, reply_to_json

THEOREM = "theorem t (p : Prop) (h : p) : p := "

# The number of items in a body is bounded too, and only the first fault in a list is reported.
# Otherwise a body holds millions of faults, each a few bytes.
_Names = Annotated[list[str], FailFast(), Field(max_length=10_000)]
_LONGEST_LABEL = 1000


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(extra="forbid", json_schema_extra={"examples": [fields]})


class Options(BaseModel):
    """How a request is queued and run; each field may be left out."""

    environment: Annotated[
        str | None, Field(description="by name; the first that the key allows unless given")
    ] = None
    timeout_s: Annotated[float, Field(description="budget of CPU time")] = 60.0
    memory_mb: Annotated[int, Field(description="budget of resident memory, in MiB")] = 4096
    scratch_mb: Annotated[int, Field(description="budget of scratch disk, in MiB")] = 256
    # Pydantic would deep-copy a default list for each request.
    allow_axioms: _Names = Field(
        default_factory=list, description="axioms allowed beside the environment's own"
    )
    audit: Annotated[bool, Field(description="whether what Lean accepts is judged")] = True
    trust_programs: Annotated[
        bool, Field(description="whether the caller vouches for a text that runs programs")
    ] = False
    statements: Annotated[
        bool, Field(description="whether theorems in the result have their statements")
    ] = True
    priority: Annotated[int, Field(description="0 (most urgent) to 2")] = 1
    deadline_s: Annotated[
        float | None, Field(description="seconds in the queue until it expires")
    ] = None
    request_id: Annotated[
        str | None,
        Field(
            description="a name of the caller's: the same again gives the same reply. A request "
            "with a name is not withdrawn where the connection closes"
        ),
    ] = None
    traceparent: Annotated[str | None, Field(description="W3C's trace context")] = None
    campaign: Annotated[str, Field(description="a name under which its cost is counted")] = ""


class Check(Options):
    """Lean's verdict on a text."""

    code: Annotated[str, Field(description="Lean source, its header included")]
    goals: Annotated[
        bool, Field(description="whether to tell the goals before each tactic (tactics)")
    ] = False
    profile: Annotated[
        bool, Field(description="whether to say where Lean spends its time, instead of judging")
    ] = False
    model_config = _example(code=f"{THEOREM}h", timeout_s=20)


class Verify(Options):
    """A candidate that has to prove a target."""

    code: Annotated[str, Field(description="the candidate: Lean source, its header included")]
    target: Annotated[str | None, Field(description="Lean source whose proofs are sorry")] = None
    theorems: Annotated[
        _Names, Field(description="instead of a target, names in the environment")
    ] = []
    holes: Annotated[
        _Names, Field(description="names in the target whose values the candidate may choose")
    ] = []
    model_config = _example(target=f"{THEOREM}sorry", code=f"{THEOREM}h")


class Step(Options):
    """A tactic, tried on a state."""

    state: Annotated[str, Field(description="from the `sorries` of a check, or from a step")]
    tactic: Annotated[str, Field(description="as it would stand behind `by`")]
    model_config = _example(state="0" * 64, tactic="exact h")


class _Item(BaseModel):
    id: Annotated[
        Annotated[str, Field(max_length=_LONGEST_LABEL)] | int | None,
        Field(description="what the result is to be known by"),
    ] = None


class CheckItem(_Item, Check):
    op: Literal["check"]


class VerifyItem(_Item, Verify):
    op: Literal["verify"]


class StepItem(_Item, Step):
    op: Literal["step"]


Body = Check | Verify | Step
Item = Annotated[CheckItem | VerifyItem | StepItem, Field(discriminator="op")]
"""One line of a batch."""

BOUNDS = Bounds(
    [*CheckItem.model_fields, *VerifyItem.model_fields, *StepItem.model_fields],
    texts=("code", "target", "state", "tactic"),
    names=("allow_axioms", "theorems", "holes"),
    is_closed=True,
)
"""The bounds of all bodies and lines."""


class Message(BaseModel):
    severity: Literal["information", "warning", "error"]
    line: Annotated[int, Field(description="from 1")]
    column: Annotated[int, Field(description="from 0, in code points")]
    text: str
    end_line: int | None
    end_column: int | None


class Sorry(BaseModel):
    line: int
    column: int
    goal: str | None
    state: str | None
    end_line: int | None
    end_column: int | None


class Tactic(BaseModel):
    line: int
    column: int
    goals: list[str]


class Theorem(BaseModel):
    name: str
    statement: Annotated[str | None, Field(description="null if not asked for")]


class Failure(BaseModel):
    name: str
    rule: str
    text: str


class DeclarationTime(BaseModel):
    name: str
    line: int
    ms: float
    parts: Annotated[dict[str, float], Field(description="what took most of it")]


class Profile(BaseModel):
    """Where Lean spent its time."""

    declarations: Annotated[list[DeclarationTime], Field(description="the longest first")]
    import_ms: float | None
    unfinished: Annotated[
        str,
        Field(description="if Lean was stopped: the first declaration of which it told nothing"),
    ]


class Result(BaseModel):
    """How a request ended."""

    request_id: str
    verdict: Verdict
    reason: Reason | None
    messages: list[Message]
    sorries: list[Sorry]
    theorems: list[Theorem]
    more_theorems: Annotated[int, Field(description="how many more there are")] = 0
    axioms: list[str] | None
    kernel: Annotated[
        str | None, Field(description="the version of the kernel that judged; null where none did")
    ]
    failed: Annotated[list[Failure], Field(description="of a verification")]
    state: Annotated[str | None, Field(description="of a step: the next state")]
    goals: Annotated[list[str], Field(description="of a step: those of the next state")]
    fingerprint: Annotated[str | None, Field(description="of the environment where Lean answered")]
    attempts: int
    worker: str
    queued_s: float
    cpu_s: float
    wall_s: float
    audit_s: Annotated[float, Field(description="of the judge alone, part of wall_s")]
    tactics: Annotated[
        list[Tactic], Field(description="with the goals before each; of a check that asked for it")
    ] = []
    profile: Annotated[Profile | None, Field(description="of a check that asked for it")] = None


class Pending(BaseModel):
    """A request that has not ended."""

    request_id: str
    status: Literal["pending"] = "pending"


class Imported(BaseModel):
    """A state that is known now."""

    state: str


class EnvironmentStatus(BaseModel):
    """One environment, at this moment."""

    name: str
    lean: Annotated[str | None, Field(description="the version of Lean")]
    fingerprint: str | None
    waiting: int
    running: int
    workers: int
    slots: int


class Status(BaseModel):
    """The part of the fleet that a key may see."""

    environments: list[EnvironmentStatus]
    tenant: str
    outstanding: Annotated[int, Field(description="the tenant's requests at this gateway")]


_OF_REPLY = (*VERIFIED, "state", "goals", "fingerprint", "audit_s", "profile")


def result_of(reply: Reply, request_id: str) -> dict[str, Any]:
    """Returns a reply as a :class:`Result`, in values that JSON has."""
    asked = ("tactics",) if reply.tactics else ()
    return {
        **reply_to_json(reply, (*_OF_REPLY, *asked)),
        "request_id": request_id,
    }
