"""leanq: Lean 4 on fleets of cheap, preemptible machines.

Everything that a program needs is here: clients, what they take and give, and the errors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from leanq.local import Pool
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

# Imported when one of their names is first asked for, the later ones for what the earlier have not:
# the command line is there at once, and only a pool needs what runs Lean.
_HOMES = (
    "leanq.errors",
    "leanq.queue.requests",
    "leanq.queue.settings",
    "leanq.client",
    "leanq.producer.request_builder",
    "leanq.producer.route",
    "leanq.producer.stream",
    "leanq.local",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(importlib.import_module, _HOMES):
            if name in vars(home):
                value = globals()[name] = vars(home)[name]
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
