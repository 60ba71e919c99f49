"""The history of the last hours, from totals that outlive the fleet.

Once a minute the first call of a script notes the shard's totals. The difference of two notes is
what happened between them, and counts for the period of the first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from leanq.errors import UsageError
from leanq.fleet.stats import read_total
from leanq.queue.metrics import BUCKETS_S
from leanq.queue.operator_queue import every_queue
from leanq.queue.settings import Settings

MINUTE_S = 60
# The scripts keep no older notes.
_MOST_S = 1500 * MINUTE_S
# The most rows that a history has.
_MOST_ROWS = 48
_PERIODS_S = (60, 300, 900, 1800, 3600)
_BOUNDS = (*map(str, BUCKETS_S), "inf")
# Totals of now that no note has, so that there is no difference of them.
_NOT_NOTED = ("reason", "waited", "ran")


@dataclass(slots=True)
class Period:
    """The requests of one period: ``length_s`` seconds from ``start_s`` (seconds since 1970 by the
    server's clock).

    Attributes:
        waited_s, ran_s: sums over all requests that a worker settled.
        cpu_s, tenants_cpu_s: CPU seconds of results, in all and by tenant; ``""`` stands for
            tenants that are not counted by name.
        waiting, workers: the largest numbers in a note.
        took: results by their time from submit to end, in the buckets of BUCKETS_S and the one
            beyond.
    """

    start_s: int
    length_s: int
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    ran_s: float = 0.0
    waiting: int = 0
    workers: int = 0
    cpu_s: float = 0.0
    tenants_cpu_s: dict[str, float] = field(default_factory=dict)
    took: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))


class Measure(NamedTuple):
    """A number of the history, of one minute and one environment.

    Attributes:
        start_s: when the minute began, in seconds since 1970 by the server's clock.
        environment: its name; ``""`` for ``workers``, which serve several.
        what: ``submitted``, ``finished`` (``part``: the verdict), ``waited_s``, ``ran_s`` and
            ``took_s`` (sums over results), ``took`` (results within ``part`` seconds and above the
            bound before it), ``cpu_s``, ``tenant_cpu_s`` (``part``: the tenant). These are of that
            minute. ``waiting`` and ``workers`` are as the minute began.
    """

    start_s: int
    environment: str
    what: str
    part: str
    value: float


async def noted(settings: Settings, since_s: float) -> list[list[Mapping[str, int]]]:
    """Returns the notes of each shard of the last ``since_s`` seconds, oldest first, and the totals
    of now after them. Raises UnavailableError, and UsageError for more than a day."""
    if since_s > _MOST_S:
        raise UsageError("totals are kept for a day; ask for the last 24h at most")
    first = int((time.time() - since_s) // MINUTE_S)
    async with every_queue(settings) as queues:
        notes = await asyncio.gather(*(queue.minutes(first) for queue in queues))
        now = await asyncio.gather(*(queue.status() for queue in queues))
    this_minute = int(time.time() // MINUTE_S)
    last = ({**status.tallies, "minute": this_minute} for status in now)
    return [[*found, end] for found, end in zip(notes, last, strict=True)]


def periods(
    shards: Sequence[Sequence[Mapping[str, int]]],
    since_s: float,
    *,
    length_s: int | None = None,
    environments: Collection[str] | None = None,
) -> list[Period]:
    """Returns the notes of all shards together, by periods of ``length_s`` or a fitting length; of
    all environments, or of some."""
    length_s = length_s or next(
        (p for p in _PERIODS_S if since_s / p <= _MOST_ROWS), _PERIODS_S[-1]
    )
    found: dict[int, Period] = {}
    # By minute and shard. Shards may have noted different minutes.
    waiting = Counter[tuple[int, int]]()
    for number, (minute_s, environment, what, part, value) in _measures(shards):
        start_s = minute_s // length_s * length_s
        # Not made for each measure: there are some 100,000 in a day.
        period = found.get(start_s) or found.setdefault(start_s, Period(start_s, length_s))
        if what == "workers":
            period.workers = max(period.workers, int(value))
        elif environments is not None and environment not in environments:
            continue
        elif what == "waiting":
            waiting[minute_s, number] += int(value)
        elif what == "submitted":
            period.submitted += int(value)
        elif what == "finished":
            period.finished[part] = period.finished.get(part, 0) + int(value)
        elif what == "took":
            period.took[_BOUNDS.index(part)] += int(value)
        elif what == "tenant_cpu_s":
            period.tenants_cpu_s[part] = period.tenants_cpu_s.get(part, 0.0) + value
        elif what in ("waited_s", "ran_s", "cpu_s"):
            setattr(period, what, getattr(period, what) + value)
    most = Counter[tuple[int, int]]()
    for (minute_s, number), count in waiting.items():
        at = minute_s // length_s * length_s, number
        most[at] = max(most[at], count)
    for (start_s, _), count in most.items():
        found[start_s].waiting += count
    return [found[start_s] for start_s in sorted(found)]


def measures(shards: Sequence[Sequence[Mapping[str, int]]]) -> list[Measure]:
    """Returns the notes of all shards together, minute by minute, without zeros. Changes since a
    note count for its minute, however late the next note comes."""
    found: defaultdict[tuple[int, str, str, str], float] = defaultdict(float)
    for _, measure in _measures(shards):
        at, value = measure[:4], measure.value
        # All shards know a worker, and a request waits in one of them.
        found[at] = max(found[at], value) if measure.what == "workers" else found[at] + value
    return [Measure(*at, value) for at, value in sorted(found.items()) if value]


def _measures(shards: Sequence[Sequence[Mapping[str, int]]]) -> Iterator[tuple[int, Measure]]:
    """Yields each shard's number and what its notes say, without zeros but for workers."""
    # A name stands in each of a day's notes, and the gateway's page reads them on its loop.
    read = cache(read_total)
    for number, notes in enumerate(shards):
        for before, after in pairwise([note for note in notes if "minute" in note]):
            start_s = before["minute"] * MINUTE_S
            yield number, Measure(start_s, "", "workers", "", before.get("workers", 0))
            for name in {*before, *after}:
                total = read(name)
                if not total or total.what in _NOT_NOTED:
                    continue
                had, has = before.get(name, 0), after.get(name, 0)
                # A failover may have rolled a counter back.
                value = had if total.what == "waiting" else max(0, has - had)
                if value:
                    part = _BOUNDS[int(total.part)] if total.what == "took" else total.part
                    count = value / total.unit
                    yield number, Measure(start_s, total.environment, total.what, part, count)
