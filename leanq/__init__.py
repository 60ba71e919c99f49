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

# Where each name is, which is imported when it is first asked for: the command line is there at
# once, and only a pool needs what runs Lean.
_HOMES = {
    "leanq.client": (
        "AsyncLeanQClient",
        "LeanQClient",
        "LeanQFuture",
    ),
    "leanq.errors": (
        "AuditError",
        "ClosedError",
        "DataError",
        "InvalidRequestError",
        "LeanQError",
        "LostError",
        "NewerMessageError",
        "NoRewardError",
        "NoWorkerError",
        "QueueError",
        "QueueFullError",
        "RecipeError",
        "ReplError",
        "RequestError",
        "SandboxError",
        "TargetError",
        "TooLargeError",
        "ToolchainError",
        "UnavailableError",
        "UnknownEnvironmentError",
        "UnknownStateError",
        "UsageError",
        "WireError",
        "WorkerError",
    ),
    "leanq.local": ("Pool",),
    "leanq.producer.request_builder": (
        "Check",
        "InEnvironment",
        "SubmitOptions",
    ),
    "leanq.producer.route": (
        "NoWorker",
        "WhenFull",
    ),
    "leanq.producer.stream": ("Result",),
    "leanq.queue.requests": (
        "Failure",
        "Message",
        "Reason",
        "Reply",
        "Rule",
        "Sorry",
        "Theorem",
        "Verdict",
        "reward",
    ),
    "leanq.queue.settings": ("Settings",),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
