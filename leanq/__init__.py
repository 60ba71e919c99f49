"""leanq: Lean 4 on fleets of cheap, preemptible machines.

Everything that a program needs is here: clients, what they take and give, and the errors.
"""

from typing import TYPE_CHECKING, Any

from leanq.client import AsyncLeanQClient, LeanQClient, LeanQFuture
from leanq.errors import (
    AuditError,
    ClosedError,
    DataError,
    InvalidRequestError,
    LeanQError,
    LostError,
    NewerMessageError,
    NoRewardError,
    NoWorkerError,
    QueueError,
    QueueFullError,
    RecipeError,
    ReplError,
    RequestError,
    SandboxError,
    TargetError,
    TooLargeError,
    ToolchainError,
    UnavailableError,
    UnknownEnvironmentError,
    UnknownStateError,
    UsageError,
    WireError,
    WorkerError,
)
from leanq.producer.request_builder import Check, InEnvironment, SubmitOptions
from leanq.producer.route import NoWorker, WhenFull
from leanq.producer.stream import Result
from leanq.queue.requests import (
    Failure,
    Message,
    Reason,
    Reply,
    Rule,
    Sorry,
    Theorem,
    Verdict,
    reward,
)
from leanq.queue.settings import Settings

if TYPE_CHECKING:
    from leanq.local import Pool

__all__ = [
    "AsyncLeanQClient",
    "AuditError",
    "Check",
    "ClosedError",
    "DataError",
    "Failure",
    "InEnvironment",
    "InvalidRequestError",
    "LeanQClient",
    "LeanQError",
    "LeanQFuture",
    "LostError",
    "Message",
    "NewerMessageError",
    "NoRewardError",
    "NoWorker",
    "NoWorkerError",
    "Pool",
    "QueueError",
    "QueueFullError",
    "Reason",
    "RecipeError",
    "ReplError",
    "Reply",
    "RequestError",
    "Result",
    "Rule",
    "SandboxError",
    "Settings",
    "Sorry",
    "SubmitOptions",
    "TargetError",
    "Theorem",
    "TooLargeError",
    "ToolchainError",
    "UnavailableError",
    "UnknownEnvironmentError",
    "UnknownStateError",
    "UsageError",
    "Verdict",
    "WhenFull",
    "WireError",
    "WorkerError",
    "reward",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # A pool runs Lean itself, and its modules would make every import half as long again.
    if name == "Pool":
        from leanq.local import Pool

        return Pool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
