"""Tools for training provers, for their agents and for their tests.

- ``rewards`` scores completions against the statements of their problems;
- ``search`` searches for proofs over states, in the order of one of the ``strategies``;
- ``trl_reward``, ``verifiers_taskset``, ``openenv_server`` and ``reward_server`` (HTTP) offer
  rewards and steps in the form of these trainers; ``feedback`` tells a model what Lean said;
- ``replay`` is a memory in Redis for learners. ``replay_entry`` defines its entries,
  ``replay_bounds`` its size; rewards and campaigns write to it through ``replay_writer``;
- ``mcp_server`` has tools for agents, behind ``leanq mcp``;
- ``testing`` has clients without a fleet, and a queue as a fixture.
"""

from typing import TYPE_CHECKING

from leanq import names_of

if TYPE_CHECKING:
    from leanq.trainers.replay import ReplayMemory as ReplayMemory
    from leanq.trainers.replay_bounds import ReplayBounds as ReplayBounds
    from leanq.trainers.replay_bounds import ReplayStats as ReplayStats
    from leanq.trainers.replay_entry import ReplayBatch as ReplayBatch
    from leanq.trainers.replay_entry import ReplayEntry as ReplayEntry
    from leanq.trainers.replay_entry import ReplayValue as ReplayValue
    from leanq.trainers.replay_writer import ReplayWriter as ReplayWriter
    from leanq.trainers.rewards import LeanReward as LeanReward
    from leanq.trainers.rewards import Score as Score
    from leanq.trainers.rewards import by_goals_left as by_goals_left
    from leanq.trainers.rewards import by_place_of_error as by_place_of_error
    from leanq.trainers.rewards import lean_text as lean_text
    from leanq.trainers.rewards import proof_text as proof_text
    from leanq.trainers.rewards import with_group_means as with_group_means
    from leanq.trainers.search import ProofSearch as ProofSearch
    from leanq.trainers.search import SearchProgress as SearchProgress
    from leanq.trainers.search import SearchResult as SearchResult
    from leanq.trainers.search import Suggestion as Suggestion
    from leanq.trainers.strategies import Beam as Beam
    from leanq.trainers.strategies import BestFirst as BestFirst
    from leanq.trainers.strategies import MonteCarlo as MonteCarlo
    from leanq.trainers.strategies import SearchNode as SearchNode

# The public names, and the module of each.
_HOMES = {
    "Beam": "leanq.trainers.strategies",
    "BestFirst": "leanq.trainers.strategies",
    "LeanReward": "leanq.trainers.rewards",
    "MonteCarlo": "leanq.trainers.strategies",
    "ProofSearch": "leanq.trainers.search",
    "ReplayBatch": "leanq.trainers.replay_entry",
    "ReplayBounds": "leanq.trainers.replay_bounds",
    "ReplayEntry": "leanq.trainers.replay_entry",
    "ReplayMemory": "leanq.trainers.replay",
    "ReplayStats": "leanq.trainers.replay_bounds",
    "ReplayValue": "leanq.trainers.replay_entry",
    "ReplayWriter": "leanq.trainers.replay_writer",
    "Score": "leanq.trainers.rewards",
    "SearchNode": "leanq.trainers.strategies",
    "SearchProgress": "leanq.trainers.search",
    "SearchResult": "leanq.trainers.search",
    "Suggestion": "leanq.trainers.search",
    "by_goals_left": "leanq.trainers.rewards",
    "by_place_of_error": "leanq.trainers.rewards",
    "lean_text": "leanq.trainers.rewards",
    "proof_text": "leanq.trainers.rewards",
    "with_group_means": "leanq.trainers.rewards",
}
__all__ = list(_HOMES)
if not TYPE_CHECKING:
    __getattr__ = names_of(_HOMES, __name__)
