"""The state of the fleet: per environment what waits, what runs and what could run; for metrics,
the scaler and people."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from leanq.queue.metrics import BUCKETS_S
from leanq.queue.operator_queue import OperatorQueue, every_queue
from leanq.queue.results import Status, WorkerRow, merged
from leanq.queue.settings import Settings
from leanq.queue.wire import environments_in, info_of

_T = TypeVar("_T")

# A tenant floods with more than so many requests that wait.
_MUCH = 100

NEARLY_FULL = 0.85
"""The share of a server's memory from which people are warned, as by LeanQRedisMemoryHigh."""

TOLD_S = 600.0
"""A scaler whose decision is older, in seconds, has gone."""


@dataclass(slots=True)
class Times:
    """How long requests took: how many fell into each bucket of BUCKETS_S and the one beyond, and
    the sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0


@dataclass(slots=True)
class EnvironmentStats:
    """One environment. A worker that serves several counts in equal parts for each.

    Attributes:
        waiting: requests in lines, and quarantined ones of a paused environment. Operators hold
            ``held`` of them back, which do not count for ``oldest_s``, the age of the oldest in
            seconds.
        quarantined: requests that may run next, alone.
        running: requests that workers hold.
        submitted, finished, reasons: totals since the beginning; ``finished`` by verdict.
        waited, ran, took: from submit to the last claim, from there to the end, and in all.
        slots, busy: of living workers.
        tenants_cpu_s: CPU seconds for results by tenant; ``""`` stands for those beyond the hundred
            that are counted by name.
        fullest: how many requests wait of the tenants that have the most, one of each priority.
        fingerprints: how many workers offer the environment with each fingerprint. With more than
            one, the same request can get two answers.
    """

    waiting: int = 0
    held: int = 0
    quarantined: int = 0
    oldest_s: float = 0.0
    running: float = 0.0
    submitted: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    waited: Times = field(default_factory=Times)
    ran: Times = field(default_factory=Times)
    took: Times = field(default_factory=Times)
    slots: float = 0.0
    busy: float = 0.0
    workers: float = 0.0
    cpu_s: float = 0.0
    fullest: Counter[str] = field(default_factory=Counter)
    tenants_cpu_s: dict[str, float] = field(default_factory=dict)
    fingerprints: Counter[str] = field(default_factory=Counter)

    def floods(self) -> tuple[str, int] | None:
        """Returns the tenant to whom most of a long queue belongs, while others use the
        environment, too."""
        tenant, waiting = max(self.fullest.items(), key=itemgetter(1), default=("", 0))
        is_most = waiting > _MUCH and waiting > 0.8 * self.due and len(self.tenants_cpu_s) > 1
        return (tenant, waiting) if is_most else None

    @property
    def due(self) -> int:
        """How many requests wait for a worker, without those held back."""
        return self.waiting - self.held + self.quarantined


@dataclass(frozen=True, slots=True)
class FleetStats:
    """The whole queue at one moment.

    Attributes:
        at_s: when, in seconds since 1970 by this machine's clock.
        environments: by name, all that workers ever offered or requests ever named.
        servers: the INFO of each shard's server.
        refused: the worker that could not join within the last minutes, and why.
    """

    at_s: float
    status: Status
    environments: Mapping[str, EnvironmentStats]
    servers: Sequence[Mapping[str, Any]] = ()
    shards: Sequence[Status] = ()
    refused: str = ""

    @property
    def living(self) -> list[WorkerRow]:
        """Returns the workers whose lease has not expired."""
        return [row for row in self.status.workers if row.lease_s > 0]

    @property
    def memory_bytes(self) -> int:
        return sum(int(info.get("used_memory", 0)) for info in self.servers)

    @property
    def memory_limit_bytes(self) -> int:
        """Their maxmemory together; 0 is no limit."""
        return sum(int(info.get("maxmemory", 0)) for info in self.servers)


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The scaler's last decision on an environment, as it told the queue.

    Attributes:
        at: when, in seconds since 1970 by the scaler's clock.
        target, order: workers wanted from now on, and before.
    """

    at: float
    target: int
    order: int
    reason: str
    text: str
    who: str


async def fleet_stats(settings: Settings) -> FleetStats:
    """Looks at the whole queue; raises UnavailableError."""
    async with every_queue(settings) as queues:
        return await fleet_stats_of(queues)


async def fleet_stats_of(queues: Sequence[OperatorQueue]) -> FleetStats:
    """Looks at all shards of a queue over open connections; raises UnavailableError."""
    shards = await _all(queue.status() for queue in queues)
    found = merged(shards)
    infos = await _all(queue.shard.ping() for queue in queues)
    return FleetStats(time.time(), found, environments_of(found), infos, shards)


def environments_of(status: Status) -> dict[str, EnvironmentStats]:
    environments: defaultdict[str, EnvironmentStats] = defaultdict(EnvironmentStats)
    for name in status.environments:
        environments[name]
    for row in status.priorities:
        environment = environments[row.environment]
        environment.waiting += row.waiting
        environment.fullest.update(row.fullest)
        if f"e:{row.environment}" in status.paused:
            environment.held += row.waiting
        else:
            environment.held += row.held
            environment.oldest_s = max(environment.oldest_s, row.oldest_s)
    for name, count in status.quarantined.items():
        if f"e:{name}" in status.paused:
            environments[name].waiting += count
            environments[name].held += count
        else:
            environments[name].quarantined += count
    for worker in status.workers:
        info = info_of(worker.info)
        names = environments_in(info)
        slots, offers = info.get("slots", 0), fingerprints_of(info)
        for name in names:
            environment, part = environments[name], 1 / len(names)
            environment.running += worker.held * part
            # A lapsed worker is about to lose its requests, and its slots are gone.
            if worker.lease_s > 0 and isinstance(slots, int):
                environment.workers += part
                environment.fingerprints.update(filter(None, [offers.get(name)]))
                environment.slots += slots * part
                environment.busy += min(worker.held, slots) * part
    for name, count in status.tallies.items():
        _add_total(environments, name, count)
    return dict(environments)


def decisions_of(status: Status) -> dict[str, DecisionRecord]:
    """Returns the scaler's last decision by environment, without those of scalers that have
    gone."""
    told: dict[str, DecisionRecord] = {}
    for name, data in sorted(status.decisions.items()):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decision = msgspec.json.decode(data, type=DecisionRecord)
            # Another scaler may keep the hash alive.
            if decision.at > time.time() - TOLD_S:
                told[name] = decision
    return told


def unsized(seen: FleetStats, sized: Collection[str]) -> dict[str, int]:
    """Returns how many requests wait in each environment that no scaler sizes.

    That environment is not in ``sized``, and no scaler has told the queue a decision on it.
    """
    told = decisions_of(seen.status)
    return {
        name: stats.due
        for name, stats in seen.environments.items()
        if name not in sized and name not in told
    }


async def _all(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    # A failed call must leave none behind that would hold up the next look.
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("list[_T]", answers)


def fingerprints_of(info: Mapping[str, Any]) -> dict[str, str]:
    return _texts(info.get("fingerprints"))


def degraded_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Returns by environment why a worker says it is slower than it should be."""
    return _texts(info.get("degraded"))


def lean_of(about: Mapping[str, Any]) -> str:
    """Returns an environment's Lean, and the kernel that judges there if it is another Lean's."""
    lean, kernel = str(about.get("lean") or about.get("driver") or ""), about.get("kernel")
    return f"{lean}, kernel {kernel}" if kernel and kernel != lean else lean


def options_of(about: Mapping[str, Any]) -> list[str]:
    """Returns Lean's options in an environment, as ``NAME=VALUE``."""
    found = about.get("options")
    return [*map(str, found)] if isinstance(found, list) else []


def _texts(found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        return {}
    return {str(name): text for name, text in found.items() if isinstance(text, str)}


class Total(NamedTuple):
    """The meaning of a total that the scripts keep by environment.

    Attributes:
        what: ``submitted``, ``finished``, ``reason`` or ``waiting``; ``waited_s``, ``ran_s`` or
            ``took_s`` for a sum of times; ``waited``, ``ran`` or ``took`` for a bucket of their
            histogram; ``cpu_s`` for CPU time, and ``tenant_cpu_s`` for a tenant's.
        part: the verdict of ``finished``, the reason, the number of a bucket, or the tenant.
        unit: how many of what the total counts make one of ``what``.
    """

    what: str
    environment: str
    part: str
    unit: int


# The first part of a name: a number of requests, a sum of milliseconds, or a bucket of times.
_WHAT = {"s": "submitted", "f": "finished", "c": "reason", "waiting": "waiting"}
_MS = {"u": "tenant_cpu_s", "u_ms": "cpu_s", "w_ms": "waited_s", "r_ms": "ran_s", "t_ms": "took_s"}
_BUCKETS = {"w": "waited", "r": "ran", "t": "took"}
_BUCKET_NUMBERS = frozenset(map(str, range(len(BUCKETS_S) + 1)))


def read_total(name: str) -> Total | None:
    """Returns the meaning of a total's name, such as ``f:mathlib:accepted``; None if it has none
    here."""
    kind, _, rest = name.partition(":")
    # Names hold no colon, so the part behind one does not belong to the environment.
    environment, _, part = rest.partition(":")
    what = _WHAT.get(kind) or _MS.get(kind) or _BUCKETS.get(kind)
    if not (what and environment):
        return None
    # Any process may have written the name, and int() refuses thousands of digits.
    if kind in _BUCKETS and part not in _BUCKET_NUMBERS:
        return None
    return Total(what, environment, part, 1000 if kind in _MS else 1)


def _add_total(environments: Mapping[str, EnvironmentStats], name: str, count: int) -> None:
    if (total := read_total(name)) is None:
        return
    stats, what, part = environments[total.environment], total.what, total.part
    if what == "submitted":
        stats.submitted = count
    elif what == "finished":
        stats.finished[part] = count
    elif what == "reason":
        stats.reasons[part] = count
    elif what == "cpu_s":
        stats.cpu_s = count / total.unit
    elif what == "tenant_cpu_s":
        stats.tenants_cpu_s[part] = count / total.unit
    elif what in _BUCKETS.values():
        getattr(stats, what).counts[int(part)] = count
    elif what in _MS.values():
        getattr(stats, what.removesuffix("_s")).sum_s = count / total.unit
