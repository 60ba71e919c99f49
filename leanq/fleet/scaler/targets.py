"""What a scaler can do about a fleet: see how large it is to be, and say how large it should be."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from leanq.errors import UsageError
from leanq.fleet.stats import FleetStats, info_of
from leanq.queue.results import WorkerRow


@dataclass(frozen=True, slots=True)
class Ordered:
    """What a target knows of an environment's workers.

    Attributes:
        order: how many are wanted so far.
        starting_s: ages of those that are ordered and not ready, as far as they are known.
        started_s: how long those took that became ready since the last look.
    """

    order: int
    starting_s: tuple[float, ...] = ()
    started_s: tuple[float, ...] = ()


class Target(Protocol):
    """Where orders go."""

    async def leads(self) -> bool:
        """Whether this scaler is the one that acts; raises TargetError."""

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        """What is ordered; raises TargetError."""

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        """Asks for so many workers; raises TargetError."""

    async def close(self) -> None:
        """Leaves the fleet as it is, unless no other process could end it."""


class Idleness:
    """For how long workers have held nothing, as far as looks at the queue tell."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, seen: FleetStats) -> None:
        """Takes in a look; the same one may come again."""
        self._since_s = {
            row.worker: self._since_s.get(row.worker, seen.at_s)
            for row in _living(seen)
            if row.held == 0
        }

    def first_to_go(self, seen: FleetStats) -> list[WorkerRow]:
        """The living workers: first those that hold least, of these those that have been idle for
        longest, and of these the youngest, which are warm for least."""

        def rank(row: WorkerRow) -> tuple[int, float, float]:
            started = info_of(row.info).get("started")
            born_s = started if isinstance(started, int | float) else 0.0
            return row.held, self._since_s.get(row.worker, seen.at_s), -born_s

        return sorted(_living(seen), key=rank)


class PrintTarget:
    """No target: decisions are shown, and the workers that there are count as ordered."""

    async def leads(self) -> bool:
        return True

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        known = seen.environments.get(environment)
        return Ordered(round(known.workers) if known else 0)

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        pass

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class _Started:
    """A worker process of ours."""

    process: subprocess.Popen[bytes]
    since_s: float
    joined: bool = False
    told_to_go: bool = False


class LocalTarget:
    """Worker processes on this machine, started and ended here. They end with the scaler.

    Args:
        worker: options of ``leanq worker``, as on a command line.
        environ: their environment variables, which name the queue.
        as_json: whether they log JSON lines, to the scaler's standard error.

    Raises:
        UsageError: the options cannot be read.
    """

    def __init__(self, worker: str, environ: Mapping[str, str], *, as_json: bool = False) -> None:
        try:
            options = shlex.split(worker)
        except ValueError as error:
            raise UsageError(f"--worker {worker!r} cannot be read: {error}") from None
        if as_json:
            options.append("--json")
        self._command = [sys.executable, "-m", "leanq", "worker", *options]
        self._environ = dict(environ)
        self._workers: list[_Started] = []
        self._idleness = Idleness()

    async def leads(self) -> bool:
        return True

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        self._workers = [worker for worker in self._workers if worker.process.poll() is None]
        self._idleness.note(seen)
        present, now = _pids(_living(seen)), time.monotonic()
        started: list[float] = []
        for worker in self._workers:
            if not worker.joined and worker.process.pid in present:
                worker.joined = True
                started.append(now - worker.since_s)
        wanted = [worker for worker in self._workers if not worker.told_to_go]
        starting = tuple(now - worker.since_s for worker in wanted if not worker.joined)
        return Ordered(len(wanted), starting, tuple(started))

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        wanted = [worker for worker in self._workers if not worker.told_to_go]
        self._workers += (self._start() for _ in range(workers - len(wanted)))
        places = {pid: n for n, pid in enumerate(_pids(self._idleness.first_to_go(seen)))}
        # Before them those that have not joined, the youngest first.
        wanted.sort(key=lambda worker: (places.get(worker.process.pid, -1), -worker.since_s))
        for worker in wanted[: max(0, len(wanted) - workers)]:
            worker.told_to_go = True
            worker.process.send_signal(signal.SIGTERM)

    async def close(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(asyncio.to_thread(worker.process.wait) for worker in self._workers))

    def _start(self) -> _Started:
        # In a session of its own, so that Ctrl-C reaches the scaler alone, which then drains them.
        process = subprocess.Popen(
            self._command, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return _Started(process, time.monotonic())


def _living(seen: FleetStats) -> list[WorkerRow]:
    return [row for row in seen.status.workers if row.lease_s > 0]


def _pids(rows: Sequence[WorkerRow]) -> list[int]:
    """The processes of those that run on this machine, in the same order."""
    here = os.uname().nodename
    infos = (info_of(row.info) for row in rows)
    return [i["pid"] for i in infos if i.get("host") == here and isinstance(i.get("pid"), int)]


def idle_workers(seen: FleetStats, environment: str) -> int:
    """How many living workers of an environment hold nothing."""
    return sum(
        row.held == 0 and environment in _environments(info_of(row.info)) for row in _living(seen)
    )


def _environments(info: Mapping[str, object]) -> Sequence[object]:
    environments = info.get("environments")
    return environments if isinstance(environments, list) else []
