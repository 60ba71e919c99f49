"""A prover of a made-up calculus: states are numbers, and a table has what tactics make of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from leanq.errors import UnavailableError
from leanq.queue.requests import Reply, Sorry, Verdict

QED = "qed"


@dataclass
class TableProver:
    """Answers as a client does.

    Args:
        moves: by state and tactic the next state, QED, or a verdict that leads nowhere.
        checks: what ``verify`` says of proofs.
    """

    moves: Mapping[tuple[str, str], str]
    checks: Verdict = "accepted"
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    verified: list[str] = field(default_factory=list)
    fails_after: int | None = None
    most_at_once: int = 0
    _at_once: int = 0

    async def check(self, code: str, **_: object) -> Reply:
        return Reply("incomplete", sorries=(Sorry(1, 0, "goal", "0"),), reason="sorry")

    async def step(self, state: str, tactic: str, **_: object) -> Reply:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.asked[state, tactic] += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._at_once -= 1
        if self.fails_after is not None and self.asked.total() > self.fails_after:
            raise UnavailableError("gone")
        match self.moves.get((state, tactic), "rejected"):
            case "qed":
                return Reply("accepted")
            case "rejected":
                return Reply("rejected", reason="lean_error")
            case "timeout":
                return Reply("timeout", reason="cpu_time")
            case following:
                return Reply(
                    "incomplete", state=following, goals=(following,), reason="goals_remain"
                )

    async def verify(self, target: str | None, code: str, **_: object) -> Reply:
        self.verified.append(code)
        return Reply(self.checks)


STATE = "0" * 64


class Flatterer:
    """Accepts each check and each step, and no verification."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def check(self, code: str, **_: object) -> Reply:
        self.asked.append("check")
        if "sorry" in code:
            return Reply("incomplete", sorries=(Sorry(1, 0, "⊢ p", STATE),), reason="sorry")
        return Reply("accepted")

    async def step(self, state: str, tactic: str, **_: object) -> Reply:
        self.asked.append("step")
        return Reply("accepted")

    async def verify(self, target: str | None, code: str, **_: object) -> Reply:
        self.asked.append("verify")
        return Reply("rejected", reason="statement_differs")
