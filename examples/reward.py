"""A reward for trainers: 1.0 where Lean accepts, 0.0 where it does not.

``python examples/reward.py`` shows the rewards of four proofs, checked on this machine. A trainer
finds its queue by ``LEANQ_URL``, or that of `leanq up`:

- TRL: ``GRPOTrainer(reward_funcs=reward, ...)``. A prompt is Lean text up to where the proof goes,
  so what is to be proved is the dataset's word, not the model's.
- verl, batch reward manager: ``compute_score = lambda solution_strs, ground_truths, **_:
  reward(solution_strs, ground_truths)``, with such texts as ground truths.

**No verdict of Lean's is no wrong proof.** For `timeout`, `memory`, `crashed` and the other
verdicts of leanq's own, a completion gets the mean of those with the same prompt that Lean has
judged (0.0 if there are none): an advantage of 0, which moves the policy neither way. A warning
counts them. To punish slow proofs, let `score` give 0.0 for `timeout`. Where the queue is gone, or
no worker offers the environment, that is raised.
"""

import asyncio
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from leanq import (
    Check,
    InvalidRequestError,
    LeanQClient,
    NoRewardError,
    Pool,
    Result,
    TooLargeError,
)
from leanq import reward as reward_of

CHECK = Check(timeout_s=60.0, tenant="reward")


@functools.cache
def lean() -> LeanQClient:
    """The client of this process, and of those forked from it: each then connects by itself."""
    return LeanQClient()


def reward(completions: Sequence[str], prompts: Sequence[str] = (), **_: object) -> list[float]:
    """A reward for each completion; ``prompts``, if any, are what they complete."""
    return scores(lean().map(texts(completions, prompts), **CHECK), prompts)


async def areward(
    completions: Sequence[str], prompts: Sequence[str] = (), **_: object
) -> list[float]:
    """The same in an event loop, which goes on meanwhile."""
    results = [result async for result in lean().amap(texts(completions, prompts), **CHECK)]
    return scores(results, prompts)


def texts(completions: Sequence[str], prompts: Sequence[str]) -> Iterable[str]:
    """The Lean texts, whole."""
    prompts = prompts or [""] * len(completions)
    return (prompt + text for prompt, text in zip(prompts, completions, strict=True))


def scores(results: Iterable[Result], prompts: Sequence[str]) -> list[float]:
    """The rewards of all results, in the order of the completions."""
    judged: list[float | None] = []
    groups: defaultdict[str, list[float]] = defaultdict(list)
    unjudged: Counter[str | None] = Counter()
    for result in results:
        value = score(result)
        judged.append(value)
        if value is None:
            unjudged[result.verdict] += 1
        else:
            groups[prompts[result.index] if prompts else ""].append(value)
    if unjudged:
        logging.warning(
            "no verdict of Lean's for %d of %d: %s", unjudged.total(), len(judged), dict(unjudged)
        )
    neutral = [fmean(groups[prompt] or [0.0]) for prompt in prompts or [""] * len(judged)]
    return [mean if value is None else value for value, mean in zip(judged, neutral, strict=True)]


def score(result: Result) -> float | None:
    """1.0 or 0.0; None where Lean has not judged."""
    if isinstance(result.error, InvalidRequestError | TooLargeError):
        # No text that Lean could read, which is the model's doing.
        return 0.0
    if result.error:
        raise result.error
    try:
        return reward_of(result.verdict)
    except NoRewardError:
        return None


THEOREM = "prelude\nimport Core\ntheorem and_swap (p q : Prop) (h : And p q) : And q p := "
PROOFS = ["And.intro h.right h.left", "And.intro h.left h.right", "sorry", "by simp"]


async def main() -> None:
    prompts = [THEOREM] * len(PROOFS)
    with Pool() as pool:
        print("reward", scores(pool.map(texts(PROOFS, prompts), **CHECK), prompts))
        results = [result async for result in pool.amap(texts(PROOFS, prompts), **CHECK)]
        print("areward", scores(results, prompts))


if __name__ == "__main__":
    asyncio.run(main())
