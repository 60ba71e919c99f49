"""What the scaler decides by, remembers and decides, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError

LONG_S = 600.0
"""For how long samples are kept."""
LEARNED_REQUESTS = 20
"""After so many, what they took is believed."""

Law = Literal["deadline", "reference"]
Reason = Literal[
    "stale",  # statistics are too old to act on: held
    "cold",  # too little is known to take workers away: held
    "backlog",  # more, or what waits misses its deadline; for the reference, the queue's minimum
    "load",  # more, for what arrives
    "starting",  # more is needed, and about to start: held
    "enough",  # held
    "settling",  # fewer would do, but not for long enough yet: held
    "busy",  # fewer would do, but none is idle: held
    "idle",  # fewer
    "empty",  # none, because nothing waits and nothing runs
    "floor",  # more than would do: the settings' least
    "ceiling",  # less than is needed: the settings' most
    "autoscaler",  # reference: the queue is short, so CPU decides above this minimum
    "undefined",  # reference: nothing completed or nobody at work in the past minute: held
]


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """What an operator sets for an environment. Whole numbers of workers; seconds.

    Attributes:
        slots: of a worker, while none is there to be asked.
        least, most: bounds of the order. ``least`` may be 0.
        deadline_s: within which a backlog is to be cleared.
        margin: the part of it that the law plans with.
        work_s: per request, believed until requests have finished.
        start_s: of a worker, from order to ready, believed until some have started.
        drain_s: what the target gives a worker to end its requests when it has to go.
        spread: square roots of the load that stand by for the load's own unevenness.
        excess_s: for how long a small excess has to last before workers go; one of more than half
            the fleet has to last for a start only.
        stale_s: older statistics are not acted on.
        clear_min: the reference's Cm, in minutes.
    """

    law: Law = "deadline"
    slots: int = 1
    least: int = 0
    most: int = 1000
    deadline_s: float = 600.0
    margin: float = 0.75
    work_s: float = 4.0
    start_s: float = 75.0
    drain_s: float = 15.0
    spread: float = 0.5
    excess_s: float = 240.0
    stale_s: float = 60.0
    clear_min: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1 or self.slots < 1:
            raise UsageError(
                f"a fleet of {self.least} to {self.most} workers with {self.slots} slots "
                "makes no sense: 0 ≤ least ≤ most, and one of each at least"
            )
        for name in ("deadline_s", "margin", "work_s", "start_s", "drain_s", "stale_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if not (self.spread >= 0 and self.excess_s >= 0 and self.clear_min > 0):
            raise UsageError("spread and excess_s cannot be negative, and clear_min must not be 0")


@dataclass(frozen=True, slots=True)
class Stats:
    """What is known of an environment at one moment.

    Attributes:
        time_s: of the statistics, by a clock that only the differences are taken of.
        age_s: how old they are.
        queued, leased: requests that wait, and that a worker has claimed.
        oldest_s: for how long the oldest has waited.
        submitted, finished: requests, ever.
        busy_s: slot seconds of the finished requests, ever.
        ready, ready_slots: workers that claim, and their slots.
        busy_slots, idle_workers: slots that run something, workers none of whose slots do.
        starting_s: ages of the workers that are ordered and not ready.
        started_s: how long those took that became ready since the last decision.
        order: the number of workers wanted so far.
    """

    time_s: float
    queued: int = 0
    leased: int = 0
    oldest_s: float = 0.0
    submitted: int = 0
    finished: int = 0
    busy_s: float = 0.0
    ready: int = 0
    ready_slots: int = 0
    busy_slots: int = 0
    idle_workers: int = 0
    starting_s: tuple[float, ...] = ()
    started_s: tuple[float, ...] = ()
    order: int = 0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One decision's statistics, as later ones need them."""

    time_s: float
    submitted: int
    finished: int
    busy_s: float
    busy_slots: int
    ready: int
    worked_s: float  # slot seconds since the first sample, those of unfinished requests included
    unfinished_s: float  # the part of them that no finished request has accounted for


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision leaves to the next. The empty one is that of a scaler that has just begun.

    Attributes:
        samples: of the past ten minutes, the last decision's at the end.
        starts_s: how long the latest workers took to become ready.
        work_s: slot seconds per request, once enough have finished.
        enough: when, and how many workers would have done.
    """

    samples: tuple[Sample, ...] = ()
    starts_s: tuple[float, ...] = ()
    work_s: float | None = None
    enough: tuple[tuple[float, int], ...] = ()

    @property
    def known_s(self) -> float:
        """For how long there have been samples."""
        return self.samples[-1].time_s - self.samples[0].time_s if self.samples else 0.0

    def since(self, seconds: float) -> Sample:
        """The oldest sample of the past ``seconds``."""
        least = self.samples[-1].time_s - seconds
        return next(sample for sample in self.samples if sample.time_s >= least)


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers, and why: a word, a sentence, and every term by its name."""

    target: int
    reason: Reason
    text: str
    terms: dict[str, float]
    memory: Memory
