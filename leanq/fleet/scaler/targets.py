"""Targets of a scaler: they tell how many workers are ordered, and take orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from leanq.fleet.stats import FleetStats
from leanq.queue.results import WorkerRow
from leanq.queue.wire import info_of


@dataclass(frozen=True, slots=True)
class Ordered:
    """A target's knowledge of an environment's workers.

    Attributes:
        starting_s: ages of the workers that are ordered and not ready, if they are known.
        started_s: start times of the workers that became ready since the last look.
    """

    order: int
    starting_s: tuple[float, ...] = ()
    started_s: tuple[float, ...] = ()


def named(pattern: str, environment: str) -> str:
    """Returns an operator's pattern with the environment's name for ``{env}``."""
    return pattern.replace("{env}", environment)


class Target(Protocol):
    """Takes a scaler's orders."""

    async def leads(self) -> bool:
        """Returns whether this scaler acts; raises TargetError."""
        return True

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        """Returns what is ordered; raises TargetError."""

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        """Asks for so many workers; raises TargetError."""

    async def close(self) -> None:
        """Leaves the fleet as it is, unless no other process could end it."""
        return


class Idleness:
    """Notes since when workers have held nothing, by looks at the queue."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, seen: FleetStats) -> None:
        """Takes in a look; the same one may come again."""
        self._since_s = {
            row.worker: self._since_s.get(row.worker, seen.at_s)
            for row in seen.living
            if row.held == 0
        }

    def first_to_go(self, seen: FleetStats) -> list[WorkerRow]:
        """Returns the living workers in the order in which they go. First come those that hold
        least, then those idle for longest, then the youngest, which are the least warm."""

        def rank(row: WorkerRow) -> tuple[int, float, float]:
            started = info_of(row.info).get("started")
            born_s = started if isinstance(started, int | float) else 0.0
            return row.held, self._since_s.get(row.worker, seen.at_s), -born_s

        return sorted(seen.living, key=rank)


class PrintTarget(Target):
    """Orders nothing: shows decisions, and counts the existing workers as ordered."""

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        known = seen.environments.get(environment)
        return Ordered(round(known.workers) if known else 0)

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        pass
