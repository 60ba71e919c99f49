"""What a simulated fleet consists of, what a policy sees of it, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from leanq.scale import Stats


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at: the queue's statistics, and what a cluster measures by itself."""

    now_s: float
    stats: Stats
    cpu_s: float  # used by ready workers, ever
    ready_slot_s: float
    order: int
    ready: int


class Policy(Protocol):
    """Asked at each tick for the number of workers."""

    def __call__(self, view: View) -> int: ...

    def restart(self) -> None:
        """Whatever was kept in memory is gone."""


@dataclass(slots=True, eq=False)
class Worker:
    ordered_s: float
    billed_s: float | None = None
    ready_s: float | None = None
    leaving: bool = False
    gone: bool = False
    place: int = -1  # among those with a free slot
    running: dict[int, Running] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    submitted_s: float
    claimed_s: float
    work_s: float
    attempts: int
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A request that came back from a worker."""

    submitted_s: float
    work_s: float
    attempts: int


@dataclass(slots=True)
class Outcome:
    """What became of a run. Workers' time counts from the moment that there is a machine."""

    waits_s: list[float]
    submitted: int
    finished: int
    lost: int
    left: int
    work_s: float
    slot_s: float
    reversals: int
    most_workers: int
    clear_s: float | None
    orders: list[tuple[float, int]]
    queue: list[tuple[float, int]]
