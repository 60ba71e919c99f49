"""Best-first proof search over a fleet: `leanq up` in one terminal, this in another.

A real policy asks a model for tactics and their probabilities, for many states at once. This one
proposes the same list for every state, and short goals come first.
"""

import asyncio
from collections.abc import Sequence

from leanq import AsyncLeanQClient, UsageError
from leanq.trainers import ProofSearch, SearchNode, SearchResult

THEOREMS = [
    "theorem and_swap (p q : Prop) (h : And p q) : And q p",
    "theorem three (p q r : Prop) (hp : p) (hq : q) (hr : r) : And p (And q (And r p))",
    "theorem curry (p q r : Prop) (f : And p q → r) : p → q → r",
    "theorem compose (p q r : Prop) (f : p → q) (g : q → r) : p → r",
]
TACTICS = ["assumption", "constructor", "intro h", "intro k", "apply f", "apply g"]
TACTICS += ["exact h.left", "exact h.right"]


async def policy(nodes: Sequence[SearchNode]) -> list[list[str]]:
    """The tactics to try on each state."""
    return [TACTICS for _ in nodes]


async def value(nodes: Sequence[SearchNode]) -> list[float]:
    """How promising each state is; more is better."""
    return [-float(sum(map(len, node.goals))) for node in nodes]


async def main() -> None:
    async with AsyncLeanQClient() as lean:

        async def prove(theorem: str) -> SearchResult:
            search = ProofSearch(f"{theorem} := sorry\n", policy, value=value)
            return await search.run(lean, max_steps=1000)

        for found in await asyncio.gather(*map(prove, THEOREMS)):
            progress = found.progress
            print(f"{found.ended}: {progress.steps} steps, {progress.states} states")
            print(found.code or "")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except UsageError as error:
        raise SystemExit(str(error)) from None
