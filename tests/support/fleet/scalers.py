"""A scaler whose time and target are the test's."""

from __future__ import annotations

from typing import Any

from leanq.errors import TargetError
from leanq.fleet.scaler.loop import Scaler
from leanq.fleet.scaler.targets import Ordered
from leanq.fleet.stats import FleetStats
from leanq.queue.settings import Settings
from leanq.scale import Decision, ScaleSettings, Stats


class RecordingTarget:
    """A target that does as it is told at once."""

    def __init__(self) -> None:
        self.orders: list[int] = []
        self.leading = True
        self.broken = False

    async def leads(self) -> bool:
        return self.leading

    async def look(self, _environment: str, _seen: FleetStats) -> Ordered:
        if self.broken:
            raise TargetError("out of reach")
        return Ordered(self.orders[-1] if self.orders else 0)

    async def order(self, _environment: str, workers: int, _seen: FleetStats) -> None:
        self.orders.append(workers)

    async def close(self) -> None:
        pass


class Loop:
    """A scaler whose time is set by the test."""

    def __init__(self, settings: Settings, environment: str = "echo", **how: Any) -> None:
        self.now = 1000.0
        self.target = RecordingTarget()
        self.told: list[tuple[Decision, Stats]] = []
        sizes = {environment: ScaleSettings(**how)}

        def tell(_name: str, decision: Decision, stats: Stats) -> None:
            self.told.append((decision, stats))

        self.scaler = Scaler(
            settings, self.target, sizes, tell=tell, who="tester", clock=lambda: self.now
        )

    async def tick(self) -> Decision:
        self.now += 15
        await self.scaler.tick()
        return self.told[-1][0]
