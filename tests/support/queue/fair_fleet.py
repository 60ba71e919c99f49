"""A fleet in simulated time on a real server: its scripts, the test's clock, and slots that are
busy for as long as requests are said to take."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from msgspec import structs

from leanq.queue.results import Job
from support.queue.shards import Shard, settlement

# Of each tenant so many requests wait at least, where it has any.
_WAITING = 20


class FairFleet:
    """Slots of one worker that take whatever request is next.

    Args:
        cost_s: per tenant what its next request takes, in seconds of CPU, of which a slot has one
            a second.

    Attributes:
        used_s: CPU seconds that each tenant's settled requests took.
        started_s: per tenant when its requests began, in seconds of the simulation.
        idle: tenants that submit nothing.
    """

    def __init__(self, shard: Shard, slots: int, cost_s: Mapping[str, Callable[[], float]]) -> None:
        self.used_s: Counter[str] = Counter()
        self.started_s: defaultdict[str, list[float]] = defaultdict(list)
        self.idle: set[str] = set()
        self._shard, self._slots, self._cost_s = shard, slots, cost_s
        self._waiting: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, Job, str, float]] = []
        self._free = slots
        self._now_s = 0.0

    async def run(self, for_s: float) -> None:
        """Goes on for so many simulated seconds."""
        until_s = self._now_s + for_s
        await self._claim()
        while self._ends and self._ends[0][0] <= until_s:
            ends_s, _, job, tenant, cost_s = heapq.heappop(self._ends)
            self._shard.advance(round(ends_s * 1000) - round(self._now_s * 1000))
            self._now_s = ends_s
            self.used_s[tenant] += cost_s  # type: ignore[assignment]
            self._free += 1
            await self._claim(job, cost_s)
        self._shard.advance(round(until_s * 1000) - round(self._now_s * 1000))
        self._now_s = until_s

    def shares(self) -> dict[str, float]:
        """What part of the CPU time used each tenant has had."""
        return {name: used_s / self.used_s.total() for name, used_s in self.used_s.items()}

    async def _claim(self, done: Job | None = None, cost_s: float = 0.0) -> None:
        await self._fill()
        settle = [structs.replace(settlement(done), cpu_ms=round(cost_s * 1000))] if done else []
        claimed = await self._shard.claim("w", self._free, settle=settle)
        assert all(claimed.accepted)
        for job in claimed.jobs:
            tenant = job.request_id.partition(" ")[0]
            took_s = self._cost_s[tenant]()
            self._waiting[tenant] -= 1
            self._free -= 1
            self.started_s[tenant].append(self._now_s)
            end = (self._now_s + took_s, next(self._numbers), job, tenant, took_s)
            heapq.heappush(self._ends, end)

    async def _fill(self) -> None:
        for tenant in self._cost_s.keys() - self.idle:
            if self._waiting[tenant] < max(_WAITING, self._slots) // 2:
                names = [
                    f"{tenant} {next(self._numbers)}" for _ in range(max(_WAITING, self._slots))
                ]
                await self._shard.submit(*names, tenant=tenant, longest_run_ms=1_000_000)
                self._waiting[tenant] += len(names)
