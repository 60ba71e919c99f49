"""leanq: Lean 4 on fleets of cheap, preemptible machines.

Everything that a program needs is here: clients, what they take and give, and the errors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leanq.campaigns.client import AsyncCampaignsClient, CampaignsClient
    from leanq.campaigns.submitted import SubmittedCampaign
    from leanq.client import AsyncLeanQClient, LeanQClient, LeanQFuture
    from leanq.errors import (
        AuditError,
        ClosedError,
        ConflictError,
        DataError,
        InvalidRequestError,
        LeanQError,
        LoginError,
        LostError,
        NewerMessageError,
        NoRewardError,
        NotPermittedError,
        NoWorkerError,
        QueueError,
        QueueFullError,
        RecipeError,
        ReplError,
        RequestError,
        SandboxError,
        StalledError,
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
    from leanq.trainers.replay import ReplayMemory
    from leanq.trainers.replay_bounds import ReplayBounds, ReplayStats
    from leanq.trainers.replay_entry import ReplayBatch, ReplayEntry, ReplayValue
    from leanq.trainers.replay_writer import ReplayWriter
    from leanq.trainers.rewards import (
        LeanReward,
        Score,
        by_goals_left,
        by_place_of_error,
        lean_text,
        proof_text,
        with_group_means,
    )
    from leanq.trainers.search import ProofSearch, SearchProgress, SearchResult, Suggestion
    from leanq.trainers.strategies import Beam, BestFirst, MonteCarlo, SearchNode

__all__ = [
    "AsyncCampaignsClient",
    "AsyncLeanQClient",
    "AuditError",
    "Beam",
    "BestFirst",
    "CampaignsClient",
    "Check",
    "ClosedError",
    "ConflictError",
    "DataError",
    "Failure",
    "InEnvironment",
    "InvalidRequestError",
    "LeanQClient",
    "LeanQError",
    "LeanQFuture",
    "LeanReward",
    "LoginError",
    "LostError",
    "Message",
    "MonteCarlo",
    "NewerMessageError",
    "NoRewardError",
    "NoWorker",
    "NoWorkerError",
    "NotPermittedError",
    "Pool",
    "ProofSearch",
    "QueueError",
    "QueueFullError",
    "Reason",
    "RecipeError",
    "ReplError",
    "ReplayBatch",
    "ReplayBounds",
    "ReplayEntry",
    "ReplayMemory",
    "ReplayStats",
    "ReplayValue",
    "ReplayWriter",
    "Reply",
    "RequestError",
    "Result",
    "Rule",
    "SandboxError",
    "Score",
    "SearchNode",
    "SearchProgress",
    "SearchResult",
    "Settings",
    "Sorry",
    "StalledError",
    "SubmitOptions",
    "SubmittedCampaign",
    "Suggestion",
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
    "by_goals_left",
    "by_place_of_error",
    "lean_text",
    "proof_text",
    "reward",
    "with_group_means",
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
    "leanq.trainers.strategies",
    "leanq.trainers.search",
    "leanq.trainers.replay_bounds",
    "leanq.trainers.replay_entry",
    "leanq.trainers.replay",
    "leanq.trainers.replay_writer",
    "leanq.trainers.rewards",
    "leanq.campaigns.client",
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
