"""Tools for training provers, for their agents and for their tests.

- ``rewards`` scores completions against the statements of their problems;
- ``search`` searches for proofs over states, in the order of one of the ``strategies``;
- ``verifiers_taskset``, ``openenv_server`` and ``reward_server`` (HTTP) offer rewards and steps in
  the form of these trainers; ``feedback`` tells a model what Lean said;
- ``replay`` is a memory in Redis for learners. ``replay_entry`` defines its entries
  and its size; rewards and campaigns write to it through ``replay_writer``;
- ``mcp_server`` has tools for agents, behind ``leanq mcp``;
- ``testing`` has clients without a fleet, and a queue as a fixture.
"""

from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import (
    ReplayBatch,
    ReplayBounds,
    ReplayEntry,
    ReplayStats,
    ReplayValue,
)
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
    "Beam",
    "BestFirst",
    "LeanReward",
    "MonteCarlo",
    "ProofSearch",
    "ReplayBatch",
    "ReplayBounds",
    "ReplayEntry",
    "ReplayMemory",
    "ReplayStats",
    "ReplayValue",
    "ReplayWriter",
    "Score",
    "SearchNode",
    "SearchProgress",
    "SearchResult",
    "Suggestion",
    "by_goals_left",
    "by_place_of_error",
    "lean_text",
    "proof_text",
    "with_group_means",
]
