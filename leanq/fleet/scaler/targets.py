"""Targets of a scaler: they tell how many workers are ordered, and take orders."""

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
from leanq.fleet.stats import FleetStats
from leanq.queue.results import WorkerRow
from leanq.queue.wire import info_of


@dataclass(frozen=True, slots=True)
class Ordered:
    """A target's knowledge of an environment's workers.

    Attributes:
        order: how many are wanted so far.
        starting_s: ages of the workers that are ordered and not ready, if they are known.
        started_s: start times of the workers that became ready since the last look.
    """

    order: int
    starting_s: tuple[float, ...] = ()
    started_s: tuple[float, ...] = ()


class Target(Protocol):
    """Takes a scaler's orders."""

    async def leads(self) -> bool:
        """Returns whether this scaler acts; raises TargetError."""

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        """Returns what is ordered; raises TargetError."""

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        """Asks for so many workers; raises TargetError."""

    async def close(self) -> None:
        """Leaves the fleet as it is, unless no other process could end it."""


class Idleness:
    """Notes since when workers have held nothing, by looks at the queue."""

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
        """Returns the living workers in the order in which they go. First come those that hold
        least, then those idle for longest, then the youngest, which are the least warm."""

        def rank(row: WorkerRow) -> tuple[int, float, float]:
            started = info_of(row.info).get("started")
            born_s = started if isinstance(started, int | float) else 0.0
            return row.held, self._since_s.get(row.worker, seen.at_s), -born_s

        return sorted(_living(seen), key=rank)


class PrintTarget:
    """Orders nothing: shows decisions, and counts the existing workers as ordered."""

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
    """A worker process that this target started."""

    process: subprocess.Popen[bytes]
    since_s: float
    joined: bool = False
    told_to_go: bool = False


class LocalTarget:
    """Starts and ends worker processes on this machine; they end with the scaler.

    Args:
        worker: options of ``leanq worker``, as on a command line.
        environ: their environment variables, which name the queue.
        as_json: whether they log JSON lines to the scaler's standard error.

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
        # First those that have not joined, the youngest first.
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
        # In a session of its own: Ctrl-C then reaches the scaler alone, which drains its workers.
        process = subprocess.Popen(
            self._command, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return _Started(process, time.monotonic())


def _living(seen: FleetStats) -> list[WorkerRow]:
    return [row for row in seen.status.workers if row.lease_s > 0]


def _pids(rows: Sequence[WorkerRow]) -> list[int]:
    """Returns the processes of the workers on this machine, in the same order."""
    here = os.uname().nodename
    infos = (info_of(row.info) for row in rows)
    return [i["pid"] for i in infos if i.get("host") == here and isinstance(i.get("pid"), int)]


def idle_workers(seen: FleetStats, environment: str) -> int:
    """Returns how many living workers of an environment hold nothing."""
    return sum(
        row.held == 0 and environment in _environments(info_of(row.info)) for row in _living(seen)
    )


def _environments(info: Mapping[str, object]) -> Sequence[object]:
    environments = info.get("environments")
    return environments if isinstance(environments, list) else []
