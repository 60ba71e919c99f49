"""What a history is to bring: requests and failures, all drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from leanq.queue.settings import Settings

REQUESTS, CLIENTS, WORKERS = 100, 2, 3
# Failures after which a lease may expire, so that attempts are charged.
CHARGING = ("kill", "freeze", "swallow", "delay")
OTHERS = (
    "term",
    "cut",
    "cut_one",
    "lose_answer",
    "lose_answer",
    "lose_answer",
    "restart",
    "pause_server",
    "forget",
    "clock",
    "full",
    "client",
)
MAX_ATTEMPTS = Settings.max_attempts


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        number: which; its request id says so.
        client: which client sends it.
        at_s: when, in seconds from the beginning.
        takes_s: how long it runs.
        same_as: the number of the request that it is identical to, or its own.
        deadline_s: in seconds; None without one.
        cancelled_after_s: when its caller gives it up; None if never.
        kills: whether whatever runs it dies of it.
    """

    number: int
    client: int
    at_s: float
    takes_s: float
    tenant: str
    priority: int
    same_as: int
    deadline_s: float | None = None
    cancelled_after_s: float | None = None
    kills: bool = False

    @property
    def request_id(self) -> str:
        return f"0-{self.number}"

    @property
    def is_ordinary(self) -> bool:
        """Whether it is to end with its answer, whatever happens."""
        return not self.kills and self.deadline_s is None and self.cancelled_after_s is None


@dataclass(frozen=True)
class Failure:
    """What befalls whom: ``kind`` is one of the above, ``at_s`` as of :class:`Ask`; ``how_long``
    is a number from 0 to 1, which each kind makes its own of, as it does of ``whom``."""

    kind: str
    at_s: float
    whom: int
    how_long: float

    def __str__(self) -> str:
        return f"{self.at_s:.2f} s: {self.kind} ({self.whom}, {self.how_long:.2f})"


@dataclass(frozen=True)
class Plan:
    """One history, whole or in part."""

    seed: int
    lease_s: float
    slots: int
    has_affinity: bool
    weights: bool
    asks: Sequence[Ask]
    failures: Sequence[Failure]

    def part(self, asks: Sequence[Ask], failures: Sequence[Failure]) -> Plan:
        """The same history with fewer requests and failures."""
        return replace(self, asks=asks, failures=failures)

    def command(self) -> str:
        """What replays it."""
        whole, text = drawn(self.seed), f"python -m simulation --seed {self.seed}"
        if len(self.asks) < len(whole.asks):
            text += f" --requests {','.join(str(ask.number) for ask in self.asks)}"
        if len(self.failures) < len(whole.failures):
            kept = [str(n) for n, each in enumerate(whole.failures) if each in self.failures]
            text += f" --failures {','.join(kept) or '-'}"
        return text


def _takes_s(rng: random.Random, mean_s: float, number: int) -> float:
    takes_s = rng.expovariate(1 / mean_s)
    # What ends before it could be claimed.
    return 0.0 if number % 5 == 1 else takes_s


def drawn(seed: int) -> Plan:
    """The history of a seed."""
    rng = random.Random(f"plan {seed}")
    lease_s = rng.choice((1.0, 2.0, 4.0))
    spread_s = rng.uniform(2.0, 5.0) * lease_s
    mean_s = rng.choice((0.02, 0.2, 0.8))
    killer = rng.random() < 0.15
    asks: list[Ask] = []
    for number in range(REQUESTS):
        at_s = rng.uniform(0, spread_s)
        special = rng.random()
        same = rng.randrange(number) if number and rng.random() < 0.15 else number
        if same != number:
            # The twins come close to each other, or would not meet.
            at_s = max(0.0, asks[same].at_s + rng.uniform(-0.2, 0.2))
            same = asks[same].same_as
        asks.append(
            Ask(
                number,
                rng.randrange(CLIENTS),
                at_s,
                takes_s=asks[same].takes_s if same != number else _takes_s(rng, mean_s, number),
                tenant=rng.choice("abc"),
                priority=rng.randrange(3),
                same_as=same,
                deadline_s=rng.uniform(0.05, 2 * lease_s) if special < 0.04 else None,
                cancelled_after_s=rng.uniform(0.0, lease_s) if 0.04 <= special < 0.08 else None,
            )
        )
    if killer:
        chosen = rng.choice([ask for ask in asks if ask.is_ordinary])
        shared = chosen.same_as
        asks = [replace(a, kills=True) if a.same_as == shared else a for a in asks]
    charging = 0 if killer else MAX_ATTEMPTS - 1
    kinds = [rng.choice(CHARGING) for _ in range(charging)]
    kinds += [rng.choice(OTHERS) for _ in range(rng.randint(5, 8) - charging)]
    failures = [
        Failure(kind, rng.uniform(0.1, spread_s + lease_s), rng.randrange(1000), rng.random())
        for kind in kinds
    ]
    return Plan(
        seed,
        lease_s,
        rng.randint(1, 3),
        has_affinity=rng.random() < 0.5,
        weights=rng.random() < 0.3,
        asks=sorted(asks, key=lambda ask: ask.at_s),
        failures=sorted(failures, key=lambda failure: failure.at_s),
    )
