"""Looks at the fleet once for all who watch it.

However many browsers watch, the gateway asks the queue once in two seconds, over the connections
that it has. While nobody watches, it does not ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cachetools import LRUCache
from msgspec import structs

from leanq.errors import QueueError, WireError
from leanq.fleet.stats import (
    DecisionRecord,
    EnvironmentStats,
    FleetStats,
    decisions_of,
    fleet_stats_of,
)
from leanq.gateway.client import GatewayClient
from leanq.queue.records import InFlight
from leanq.queue.results import DeadLetter

log = logging.getLogger("leanq.gateway")

_T = TypeVar("_T")

EVERY_S = 2.0
"""Seconds between two looks."""

SHOWN = 50
"""The most requests and dead letters that a list shows."""

DAY_S = 86_400
# One note in so many minutes is enough for a chart of a day.
_NOTE_EVERY_MIN = 5
_RATES_OVER_S = 60.0
_TIMES_OVER_S = 300.0
_DEAD_LISTED = 500
_DECISIONS_KEPT = 8
# Over all tenants; a viewer may see only one of them.
_RUNNING_LISTED = 200
_WORKERS_ASKED = 1000


Totals = tuple[float, Mapping[str, EnvironmentStats]]
"""The time of an earlier look in seconds since 1970, and what was submitted and finished in each
environment by then."""


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one moment.

    Attributes:
        stats: of all clusters together.
        notes: for each shard, its totals of the last day every few minutes, and now.
        minute_ago, five_minutes_ago: totals by environment with their time, or the oldest that are
            known.
        running: the requests that have run the longest; quarantined: the next to be tried in
            isolation.
        dead: the newest dead letters, without their texts.
        decisions: the scaler's latest, by environment, newest first.
        troubles: errors of the look, by the part of the page that lacks its data.
    """

    at_s: float
    stats: FleetStats
    notes: Sequence[Sequence[Mapping[str, int]]] = ()
    minute_ago: Totals = (0.0, {})
    five_minutes_ago: Totals = (0.0, {})
    running: Sequence[InFlight] = ()
    quarantined: Sequence[InFlight] = ()
    dead: Sequence[DeadLetter] = ()
    decisions: Mapping[str, Sequence[DecisionRecord]] = field(default_factory=dict)
    troubles: Mapping[str, str] = field(default_factory=dict)


class FleetLooks:
    """Looks at the fleet at most once in ``EVERY_S`` seconds, however many callers ask."""

    def __init__(self, lean: GatewayClient) -> None:
        self._queues = lean.queues
        self._looking = asyncio.Lock()
        self._seen: Look | None = None
        self._due_s = 0.0
        self._notes: list[list[Mapping[str, int]]] = [[] for _ in self._queues]
        self._totals: deque[Totals] = deque()
        self._letters: LRUCache[str, DeadLetter] = LRUCache(4 * _DEAD_LISTED)
        self._decisions: dict[str, deque[DecisionRecord]] = {}

    async def look(self) -> Look:
        """Returns the fleet as it was within the last seconds; raises UnavailableError."""
        async with self._looking:
            if self._seen is None or time.monotonic() >= self._due_s:
                self._seen = await self._look()
                self._due_s = time.monotonic() + EVERY_S
            return self._seen

    def forget(self) -> None:
        """Makes the next look a new one, after a change."""
        self._due_s = 0.0

    async def _look(self) -> Look:
        stats = await fleet_stats_of(self._queues)
        self._keep_totals(stats)
        self._keep_decisions(stats)
        troubles: dict[str, str] = {}

        async def part(name: str, work: Callable[[], Awaitable[Sequence[_T]]]) -> Sequence[_T]:
            # If the gateway's user may not see a part, the other parts are still shown.
            try:
                return await work()
            except QueueError as error:
                log.warning("the page's %s: %s", name, error)
                troubles[name] = "the queue did not tell; the gateway's log says why"
                return ()

        notes = await part("history", lambda: self._day(stats))
        return Look(
            time.time(),
            stats,
            notes,
            self._total_of(_RATES_OVER_S),
            self._total_of(_TIMES_OVER_S),
            await part("requests", lambda: self._running(stats)),
            await part("requests", lambda: self._quarantined(stats)),
            await part("dead", self._dead),
            {name: tuple(kept) for name, kept in self._decisions.items()},
            troubles,
        )

    async def _day(self, stats: FleetStats) -> Sequence[Sequence[Mapping[str, int]]]:
        first = int(time.time() - DAY_S) // 60
        for queue, kept in zip(self._queues, self._notes, strict=True):
            since = kept[-1]["minute"] + 1 if kept else first
            for note in await queue.minutes(since):
                if "minute" in note:
                    self._keep_note(kept, note)
            while kept and kept[0]["minute"] < first:
                del kept[0]
        minute = int(time.time() // 60)
        return [
            [*kept, {**shard.tallies, "minute": minute}]
            for kept, shard in zip(self._notes, stats.shards, strict=True)
        ]

    @staticmethod
    def _keep_note(kept: list[Mapping[str, int]], note: Mapping[str, int]) -> None:
        # Keep the last note whatever its minute; a later one replaces it if it is close to the note
        # before.
        if len(kept) > 1 and note["minute"] - kept[-2]["minute"] < _NOTE_EVERY_MIN:
            kept[-1] = note
        else:
            kept.append(note)

    async def _running(self, stats: FleetStats) -> Sequence[InFlight]:
        workers = [row.worker for row in stats.status.workers if row.held][:_WORKERS_ASKED]
        if not workers:
            return ()
        found = [
            request
            for queue in self._queues
            for request in await queue.running(workers, _RUNNING_LISTED)
        ]
        return sorted(found, key=lambda request: -request.running_s)

    async def _quarantined(self, stats: FleetStats) -> Sequence[InFlight]:
        return [
            request
            for name in stats.status.quarantined
            for queue in self._queues
            for request in await queue.quarantined(name, SHOWN)
        ]

    async def _dead(self) -> Sequence[DeadLetter]:
        found = []
        for queue in self._queues:
            for request_id in await queue.dead_request_ids(_DEAD_LISTED):
                # A dead letter never changes, and reading it fetches the request's whole text.
                kept = self._letters.get(request_id)
                with contextlib.suppress(WireError):
                    if kept is None and (letter := await queue.dead_letter(request_id)):
                        asked = structs.replace(letter.submission, body=b"")
                        kept = replace(letter, submission=asked, reply=b"")
                        self._letters[request_id] = kept
                if kept:
                    found.append(kept)
        return sorted(found, key=lambda letter: -letter.died_s)

    def _keep_totals(self, stats: FleetStats) -> None:
        # Some hundred looks are kept, so without what grows with tenants and reasons.
        now = {
            name: EnvironmentStats(submitted=each.submitted, finished=each.finished, took=each.took)
            for name, each in stats.environments.items()
        }
        # A restarted server, or a replica that took over, has lower counts.
        if self._totals and any(
            now[name].submitted < before.submitted
            for name, before in self._totals[-1][1].items()
            if name in now
        ):
            self._totals.clear()
        self._totals.append((stats.at_s, now))
        while len(self._totals) > 1 and self._totals[1][0] < stats.at_s - _TIMES_OVER_S:
            self._totals.popleft()

    def _total_of(self, ago_s: float) -> Totals:
        """Returns the oldest totals of at most that age."""
        since_s = self._totals[-1][0] - ago_s
        return next(each for each in self._totals if each[0] >= since_s)

    def _keep_decisions(self, stats: FleetStats) -> None:
        told = decisions_of(stats.status)
        for name, made in told.items():
            kept = self._decisions.setdefault(name, deque(maxlen=_DECISIONS_KEPT))
            # A decision that repeats the last one's order replaces it.
            if kept and (kept[0].target, kept[0].reason) == (made.target, made.reason):
                kept[0] = made
            else:
                kept.appendleft(made)
        for name in self._decisions.keys() - told.keys():
            del self._decisions[name]
