"""The law for workers that another scheduler places: a job for each worker.

Slurm and Ray know the jobs by their name, so a scaler that starts anew finds those of the one
before. A worker tells the name of its job, by which the scaler knows which job is idle.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from leanq.fleet.scaler.targets import Idleness, Ordered, Target
from leanq.fleet.stats import FleetStats
from leanq.queue.wire import info_of

log = logging.getLogger("leanq.scaler")

# Jobs that end before they have joined the queue are started again after growing pauses.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job that the scheduler knows.

    Attributes:
        id: by which the scheduler ends it.
        told: by which its worker tells that it runs there.
        age_s: since it was ordered.
    """

    id: str
    told: str
    pending: bool
    age_s: float


class _Environment:
    """The jobs of one environment at the last look, and whether such jobs end at once.

    Attributes:
        jobs: those that run or will, by their ids.
        ready: those whose worker has joined the queue.
        told_to_go: those that this scaler has ended.
        pause_until_s: the monotonic time before which nothing is started.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.ready: set[str] = set()
        self.told_to_go: set[str] = set()
        self.pause_until_s = self._pause_s = 0.0
        self._seen = False

    def note(self, jobs: dict[str, Job], ready: set[str]) -> list[str]:
        """Takes in a look; returns the jobs whose worker has joined since the last one."""
        known = self.jobs.keys()
        lost = [
            job
            for job in known - jobs.keys() - self.ready - self.told_to_go
            if not self.jobs[job].pending
        ]
        joined = [job for job in ready - self.ready if self._seen]
        if joined:
            self._pause_s = 0.0
        elif lost:
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self.pause_until_s = time.monotonic() + self._pause_s
            log.warning(
                "%d jobs ended before their workers joined the queue, such as %s; no more are "
                "started for %.0f s: look at that job's output",
                len(lost),
                min(lost),
                self._pause_s,
            )
        self.jobs, self.ready, self._seen = jobs, ready & jobs.keys(), True
        return joined


class JobTarget(Target, abc.ABC):
    def __init__(self, environments: Collection[str]) -> None:
        self._idleness = Idleness()
        self._environments = {name: _Environment() for name in environments}

    @abc.abstractmethod
    async def jobs(self, environment: str) -> list[Job]:
        """Returns the jobs that run or will; raises TargetError."""

    @abc.abstractmethod
    async def start(self, environment: str, count: int) -> None:
        """Orders so many jobs more; raises TargetError."""

    @abc.abstractmethod
    async def end(self, ids: Collection[str], ready: Collection[str]) -> None:
        """Drains these jobs, of which the workers of ``ready`` have joined; raises TargetError."""

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        self._idleness.note(seen)
        known = self._environments[environment]
        listed = {job.id: job for job in await self.jobs(environment)}
        told = {info_of(row.info).get("job") for row in seen.living}
        ready = {job.id for job in listed.values() if not job.pending and job.told in told}
        # One that was started again before it could drain has forgotten that.
        if again := known.told_to_go & listed.keys():
            await self.end(again, ready)
        jobs = {name: job for name, job in listed.items() if name not in known.told_to_go}
        joined = known.note(jobs, ready)
        known.told_to_go &= listed.keys()
        return Ordered(
            len(jobs),
            tuple(job.age_s for job in jobs.values() if job.id not in known.ready),
            tuple(jobs[name].age_s for name in joined if name in jobs),
        )

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        known = self._environments[environment]
        if (more := workers - len(known.jobs)) > 0:
            if time.monotonic() >= known.pause_until_s:
                await self.start(environment, more)
        elif more:
            going = [job.id for job in self._first_to_go(known, seen)][:-more]
            known.told_to_go.update(going)
            await self.end(going, known.ready)

    def _first_to_go(self, known: _Environment, seen: FleetStats) -> list[Job]:
        """Returns the jobs in the order in which they go: those that wait for a place, those whose
        worker has not joined, then by what their workers hold."""
        rows = self._idleness.first_to_go(seen)
        places: Mapping[object, int] = {
            info_of(row.info).get("job"): place for place, row in enumerate(rows)
        }

        def rank(job: Job) -> tuple[bool, int, float]:
            place = places.get(job.told, -1) if job.id in known.ready else -1
            return not job.pending, place, job.age_s

        return sorted(known.jobs.values(), key=rank)
