"""The parts of a simulated fleet, a policy's view of it, and the outcome of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from leanq.scale import Stats


@dataclass(frozen=True, slots=True)
class View:
    """A policy's view: the queue's statistics, and the cluster's own measurements."""

    now_s: float
    stats: Stats
    cpu_s: float  # used by ready workers, ever
    ready_slot_s: float
    order: int
    ready: int


class Policy(Protocol):
    """A policy, asked at each tick for the number of workers."""

    def __call__(self, view: View) -> int: ...

    def restart(self) -> None:
        """Forgets everything that was kept in memory."""


@dataclass(slots=True, eq=False)
class Worker:
    ordered_s: float
    billed_s: float | None = None
    ready_s: float | None = None
    leaving: bool = False
    gone: bool = False
    place: int = -1  # its place among the workers with a free slot
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
    """The outcome of a run. Workers' time counts from the moment that there is a machine."""

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
