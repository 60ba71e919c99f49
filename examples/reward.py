"""A reward for trainers: 1.0 where a completion proves its problem's statement, 0.0 where not.

``python examples/reward.py`` shows the rewards of four proofs, checked on this machine. A trainer
finds its queue by ``LEANQ_URL``, or that of `leanq up`:

- TRL: ``GRPOTrainer(reward_funcs=score, ...)``, with a data set whose column ``statement`` has Lean
  text with a ``sorry`` for the proof. A completion without a verdict of Lean's has the reward None,
  which TRL leaves out.
- verl, batch reward manager: ``compute_score`` below, with the statements as ground truths.

The data set states the theorem, not the model. If the queue is gone or the fleet does not answer,
the reward raises an error; it never gives 0 for that.
"""

import asyncio
from collections.abc import Sequence

from leanq import Pool
from leanq.trainers import LeanReward, proof_text, with_group_means

# For models that write whole texts, leave `extract` out.
score = LeanReward(extract=proof_text, timeout_s=60.0, tenant="reward")


def compute_score(
    solution_strs: Sequence[str], ground_truths: Sequence[str], **_: object
) -> list[float]:
    """For trainers that know no missing reward: it becomes the mean of the same problem's."""
    rewards = asyncio.run(score(solution_strs, statement=ground_truths))
    return with_group_means(rewards, ground_truths)


STATEMENT = "theorem and_swap (p q : Prop) (h : And p q) : And q p := sorry"
PROOFS = ["And.intro h.right h.left", "And.intro h.left h.right", "sorry", "```lean\nby simp\n```"]

if __name__ == "__main__":
    with Pool() as pool:
        local = LeanReward(pool, extract=proof_text)
        print(asyncio.run(local(PROOFS, statement=[STATEMENT] * len(PROOFS))))
