"""History for Prometheus: what was noted by the minute, as samples of the fleet's metrics.

A note has totals so far. Between two of them whatever happened counts for the minute of the first
(as in :mod:`leanq.fleet.history`), and within that minute a total is taken to have grown evenly: so
there are samples as close as Prometheus scrapes, and a dashboard's rates come out right.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from leanq.errors import UsageError
from leanq.fleet.history import MINUTE_S, noted
from leanq.queue.settings import Settings

TimedSample = tuple[str, tuple[str, ...], float, int]
"""A metric's name, the values of its labels, its own, and when, in seconds since 1970."""

Notes = Sequence[Mapping[str, int]]

# As deploy/observability/prometheus.yml and k8s/ have it.
_SCRAPED_EVERY_S = 15
# Prometheus still writes these hours itself, and would lose them to a block that holds them too.
_HEAD_H = 3


async def backfill(settings: Settings, since_s: float) -> Iterator[TimedSample]:
    """The last ``since_s`` seconds but those that Prometheus still writes.

    Raises:
        UnavailableError: a shard cannot be reached.
        UsageError: nothing would be left.
    """
    if since_s <= _HEAD_H * 3600:
        raise UsageError(
            f"Prometheus keeps the last {_HEAD_H} hours to itself; ask for more than {_HEAD_H}h"
        )
    now_s = int(time.time())
    shards = await noted(settings, since_s)
    return timeline(shards, now_s - int(since_s), now_s - _HEAD_H * 3600)


def timeline(shards: Sequence[Notes], first_s: int, last_s: int) -> Iterator[TimedSample]:
    """The notes of all shards together, from ``first_s`` to before ``last_s``, each series in the
    order of time, and none from before the first note."""
    shards = [[note for note in notes if "minute" in note] for notes in shards]
    shards = [notes for notes in shards if notes]
    minutes = (notes[0]["minute"] for notes in shards)
    first_s = max(first_s, min(minutes, default=last_s) * MINUTE_S)
    every = _SCRAPED_EVERY_S
    times = range(-(-first_s // every) * every, last_s, every)
    names = sorted(set(chain.from_iterable(chain.from_iterable(shards))))
    for name in names:
        if counter := _counter(name):
            metric, labels, unit = counter
            totals = zip(*(_totals(notes, name, times) for notes in shards), strict=True)
            for at_s, parts in zip(times, totals, strict=True):
                yield metric, labels, sum(parts) / unit, at_s
        elif gauge := _gauge(name):
            for at_s, count in sorted(_seen(shards, name).items()):
                if first_s <= at_s < last_s:
                    yield *gauge, count, at_s


def _totals(notes: Notes, name: str, times: Iterable[int]) -> Iterator[float]:
    """A shard's total at each of these times, which ascend."""
    after = iter(notes[1:])
    before, following = notes[0], next(after, None)
    total = before.get(name, 0)
    for at_s in times:
        while following and following["minute"] * MINUTE_S <= at_s:
            total += _new(before, following, name)
            before, following = following, next(after, None)
        part = (at_s - before["minute"] * MINUTE_S) / MINUTE_S
        rise = _new(before, following, name) if following else 0
        yield total + rise * min(1.0, max(0.0, part))


def _seen(shards: Sequence[Notes], name: str) -> Counter[int]:
    """What all shards together saw at each moment of which there are notes."""
    seen = Counter[int]()
    for note in chain.from_iterable(shards):
        if name in note:
            at_s, count = note["minute"] * MINUTE_S, note[name]
            # A worker is known to all shards, and a request waits in one.
            seen[at_s] = max(seen[at_s], count) if name == "workers" else seen[at_s] + count
    return seen


def _new(before: Mapping[str, int], after: Mapping[str, int], name: str) -> int:
    # A failover may have rolled a counter back.
    return max(0, after.get(name, 0) - before.get(name, 0))


def _counter(name: str) -> tuple[str, tuple[str, ...], int] | None:
    """The metric that a total belongs to, its labels' values, and how many of it make one."""
    kind, _, environment = name.partition(":")
    if kind == "s":
        return "leanq_requests_submitted_total", (environment,), 1
    if kind == "f":
        environment, _, verdict = environment.partition(":")
        return "leanq_requests_finished_total", (environment, verdict), 1
    if kind == "r_ms":
        return "leanq_slot_busy_seconds_total", (environment,), 1000
    return None


def _gauge(name: str) -> tuple[str, tuple[str, ...]] | None:
    if name == "workers":
        return "leanq_workers", ("alive",)
    kind, _, environment = name.partition(":")
    return ("leanq_requests", (environment, "waiting")) if kind == "waiting" else None
