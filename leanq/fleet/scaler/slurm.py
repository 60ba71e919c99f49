"""Slurm as a scaler's target: each worker is a task of a job array.

Nothing is kept here that a new scaler would miss. The controller knows the jobs of this user by
their name, so a scaler that starts anew finds those of the one before. A worker tells its job's
number (``SLURM_JOB_ID``), by which the scaler knows which task is idle.

Slurm has no lease for scalers. Run the scaler as a job with ``--dependency=singleton``: then the
controller lets one of that name run at a time.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from leanq.errors import TargetError, UsageError
from leanq.fleet.scaler.targets import Idleness, Ordered
from leanq.fleet.stats import FleetStats
from leanq.queue.wire import info_of

log = logging.getLogger("leanq.scaler")

# A controller that reads its configuration answers within seconds; squeue itself retries.
_CALL_S = 60.0
# Of a task: what scancel takes, its own number once it runs, its state, when it was submitted.
_FORMAT = "%i|%A|%T|%V"
# Those that run or will; one that completes has been told to end, or ends by itself.
_STATES = "PENDING,CONFIGURING,RUNNING,SUSPENDED,RESIZING,STOPPED"
# Variables of a job, and not of the cluster as a whole.
_OF_A_JOB = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)|SLURMD_|SBATCH_")
# Tasks that end before they have joined the queue are started again after growing pauses.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


@dataclass(frozen=True, slots=True)
class _Task:
    """A task that the controller knows. ``job`` is its worker's ``SLURM_JOB_ID``."""

    id: str
    job: str
    pending: bool
    age_s: float


class _Environment:
    """The tasks of one environment at the last look, and whether such tasks end at once.

    Attributes:
        tasks: those that run or will, by what ``scancel`` takes.
        ready: those whose worker has joined the queue.
        pause_until_s: the monotonic time before which nothing is submitted.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, _Task] = {}
        self.ready: set[str] = set()
        self.cancelled: set[str] = set()
        self.pause_until_s = self._pause_s = 0.0
        self._seen = False

    def note(self, tasks: dict[str, _Task], ready: set[str]) -> list[str]:
        """Takes in a look; returns the tasks whose worker has joined since the last one."""
        known = self.tasks.keys()
        lost = [
            task
            for task in known - tasks.keys() - self.ready - self.cancelled
            if not self.tasks[task].pending
        ]
        joined = [task for task in ready - self.ready if self._seen]
        if joined:
            self._pause_s = 0.0
        elif lost:
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self.pause_until_s = time.monotonic() + self._pause_s
            log.warning(
                "%d tasks ended before their workers joined the queue, such as %s; no more are "
                "submitted for %.0f s: look at that task's output",
                len(lost),
                min(lost),
                self._pause_s,
            )
        self.tasks, self.ready, self._seen = tasks, ready & tasks.keys(), True
        self.cancelled &= tasks.keys()
        return joined


class SlurmTarget:
    """Array tasks of this user on a Slurm cluster, one for each worker.

    Slurm's programs have to be on PATH.

    Args:
        script: the batch script of one worker; ``{env}`` in it stands for the environment's name.
        job_name: the jobs' name, likewise. Jobs of this name and user are the fleet.

    Raises:
        UsageError: there is no such script.
    """

    def __init__(self, script: str, job_name: str, environments: list[str]) -> None:
        self._script = script
        self._job_name = job_name
        self._idleness = Idleness()
        self._environments = {name: _Environment() for name in environments}
        for name in environments:
            if not Path(path := _named(script, name)).is_file():
                raise UsageError(f"--script: there is no batch script {path}")

    async def leads(self) -> bool:
        return True

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        self._idleness.note(seen)
        name = _named(self._job_name, environment)
        listed = await _run(
            *("squeue", "--noheader", "--array", f"--user={getpass.getuser()}"),
            *(f"--name={name}", f"--states={_STATES}", f"--format={_FORMAT}"),
        )
        tasks = {task.id: task for task in _tasks(listed)}
        jobs = {info_of(row.info).get("job") for row in seen.status.workers if row.lease_s > 0}
        ready = {task.id for task in tasks.values() if not task.pending and task.job in jobs}
        joined = self._environments[environment].note(tasks, ready)
        return Ordered(
            len(tasks),
            tuple(task.age_s for task in tasks.values() if task.id not in ready),
            tuple(tasks[task].age_s for task in joined),
        )

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        known = self._environments[environment]
        if (more := workers - len(known.tasks)) > 0:
            if time.monotonic() >= known.pause_until_s:
                await _run(
                    *("sbatch", "--parsable", "--requeue", f"--array=0-{more - 1}"),
                    f"--job-name={_named(self._job_name, environment)}",
                    _named(self._script, environment),
                )
            return
        going = [task.id for task in self._first_to_go(known, seen)][: -more or None]
        if more and going:
            known.cancelled.update(going)
            await _run("scancel", *going)

    async def close(self) -> None:
        """Leaves the tasks as they are."""

    def _first_to_go(self, known: _Environment, seen: FleetStats) -> list[_Task]:
        """Returns the tasks in the order in which they go: those that wait for a node, those whose
        worker has not joined, then by what their workers hold."""
        rows = self._idleness.first_to_go(seen)
        places = {info_of(row.info).get("job"): place for place, row in enumerate(rows)}

        def rank(task: _Task) -> tuple[bool, int, float]:
            place = places.get(task.job, -1) if task.id in known.ready else -1
            return not task.pending, place, task.age_s

        return sorted(known.tasks.values(), key=rank)


def _tasks(listed: str) -> Iterator[_Task]:
    """Yields the tasks of ``squeue``'s answer; raises TargetError."""
    now = datetime.now()  # squeue prints local times, without a zone
    for line in listed.splitlines():
        try:
            task, job, state, submitted = line.split("|")
            age_s = (now - datetime.fromisoformat(submitted)).total_seconds()
        except ValueError:
            raise TargetError(f"squeue printed {line!r}; expected {_FORMAT}") from None
        yield _Task(task, job, state in ("PENDING", "CONFIGURING"), max(0.0, age_s))


def _named(pattern: str, environment: str) -> str:
    return pattern.replace("{env}", environment)


async def _run(*command: str) -> str:
    """Returns what one of Slurm's programs prints; raises TargetError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            # What Slurm tells the scaler's own job must not become the workers' options.
            env={name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise TargetError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(_CALL_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise TargetError(f"{command[0]} has not answered within {_CALL_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())
        raise TargetError(f"{command[0]} ended with code {process.returncode}: {said}")
    return out.decode(errors="replace")
