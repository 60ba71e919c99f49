"""The scaler's loop: look, decide on each environment by itself, order, and tell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from leanq.errors import QueueError, TargetError, UnavailableError
from leanq.fleet.prometheus import Sample, fleet_samples
from leanq.fleet.scaler.targets import Ordered, Target
from leanq.fleet.shown import plural
from leanq.fleet.stats import DecisionRecord, EnvironmentStats, FleetStats, fleet_stats_of, unsized
from leanq.queue.operator_queue import OperatorQueue, every_queue
from leanq.queue.settings import Settings
from leanq.queue.wire import environments_in, info_of
from leanq.scale import Decision, Memory, ScaleSettings, Stats, decide

log = logging.getLogger("leanq.scaler")


@dataclass(slots=True)
class _Environment:
    settings: ScaleSettings
    memory: Memory | None = None
    stats: Stats | None = None
    decision: Decision | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    errors: int = 0


class Scaler:
    """Sizes the environments of one queue.

    Args:
        tell: called with each decision, for people.
        who: the scaler's name, under which the queue is told its decisions; empty to tell none.
    """

    def __init__(
        self,
        settings: Settings,
        target: Target,
        environments: Mapping[str, ScaleSettings],
        *,
        every_s: float = 15.0,
        tell: Callable[[str, Decision, Stats], None] = lambda *_: None,
        who: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._target = target
        self._environments = {name: _Environment(how) for name, how in environments.items()}
        self._every_s = every_s
        self._tell = tell
        self._who = who
        self._clock = clock
        self._seen: FleetStats | None = None
        self._seen_at_s = 0.0
        self._leads = False
        self._unsized: dict[str, int] = {}

    async def run(self) -> None:
        try:
            while True:
                next_s = self._clock() + self._every_s
                await self.tick()
                await asyncio.sleep(max(0.0, next_s - self._clock()))
        finally:
            await self._target.close()

    async def tick(self) -> None:
        async with every_queue(self._settings) as queues:
            await self._tick(queues)

    async def _tick(self, queues: Sequence[OperatorQueue]) -> None:
        now = self._clock()
        try:
            self._seen, self._seen_at_s = await fleet_stats_of(queues), now
            if not self._seen.status.workers:
                # Workers do so otherwise, and no worker comes if no client can submit.
                for queue in queues:
                    await queue.shard.load_for_clients()
        except UnavailableError as error:
            log.warning("no statistics: %s", error)
        try:
            self._leads = await self._target.leads()
        except TargetError as error:
            log.warning("%s", error)
            self._leads = False
        if self._seen is None:
            return
        self._warn_of_unsized(self._seen)
        told: dict[str, DecisionRecord] = {}
        for name, environment in self._environments.items():
            try:
                told[name] = await self._decide(name, environment, self._seen, now)
            except TargetError as error:
                # The next tick tries again.
                environment.errors += 1
                log.warning("%s", error)
        # If the server was just out of reach, do not wait for it again.
        if told and self._who and self._leads and self._seen_at_s == now:
            try:
                data = {name: msgspec.json.encode(what) for name, what in told.items()}
                await asyncio.gather(*(queue.publish_decisions(data) for queue in queues))
            except QueueError as error:
                log.warning("the decision is not shown to others: %s", error)

    def _warn_of_unsized(self, seen: FleetStats) -> None:
        """Warns when requests begin to wait in an environment that no scaler sizes."""
        before, self._unsized = self._unsized, unsized(seen, self._environments)
        for name, count in self._unsized.items():
            if count and not before.get(name):
                served = bool(seen.environments[name].workers)
                log.warning(
                    "%s in %s, which no scaler sizes (this one: %s)%s: name it with --env, or "
                    "start workers for it",
                    plural(count, "request waits", "requests wait"),
                    name,
                    ", ".join(self._environments),
                    "" if served else " and no worker offers",
                )

    async def _decide(
        self, name: str, environment: _Environment, seen: FleetStats, now: float
    ) -> DecisionRecord:
        ordered = await self._target.look(name, seen)
        stats = replace(_stats(name, seen, ordered, now), age_s=now - self._seen_at_s)
        decision = decide(stats, environment.settings, environment.memory)
        environment.memory, environment.stats = decision.memory, stats
        environment.decision = decision
        environment.reasons[decision.reason] += 1
        self._tell(name, decision, stats)
        if self._leads and decision.target != ordered.order:
            log.info("%s: from %d to %d: %s", name, ordered.order, decision.target, decision.text)
            await self._target.order(name, decision.target, seen)
        why = decision.reason, decision.text
        return DecisionRecord(time.time(), decision.target, ordered.order, *why, self._who)

    def samples(self) -> Iterator[Sample]:
        """Yields the fleet's metrics as of the last look, and the scaler's own."""
        fresh = self._seen and self._clock() - self._seen_at_s <= 2 * self._every_s
        yield "leanq_up", (), int(bool(fresh))
        if self._seen:
            yield from (s for s in fleet_samples(self._seen) if s[0] != "leanq_up")
        yield "leanq_scaler_leader", (), int(self._leads)
        for name, count in self._unsized.items():
            yield "leanq_scaler_unsized_requests", (name,), count
        for name, environment in self._environments.items():
            yield "leanq_scaler_errors_total", (name,), environment.errors
            for reason, count in environment.reasons.items():
                yield "leanq_scaler_decisions_total", (name, reason), count
            if environment.decision and environment.stats:
                stale = environment.decision.reason == "stale"
                yield "leanq_scaler_stale", (name,), int(stale)
                yield "leanq_scaler_target_workers", (name,), environment.decision.target
                for term, value in environment.decision.terms.items():
                    yield "leanq_scaler_term", (name, term), value
                for what in ("queued", "leased", "ready", "ready_slots", "busy_slots", "order"):
                    value = getattr(environment.stats, what)
                    yield "leanq_scaler_input", (name, what), value


def _stats(name: str, seen: FleetStats, ordered: Ordered, now: float) -> Stats:
    environment = seen.environments.get(name) or EnvironmentStats()
    idle = [row for row in seen.living if row.held == 0]
    return Stats(
        time_s=now,
        # Paused requests need no worker.
        queued=environment.due,
        leased=round(environment.running),
        oldest_s=environment.oldest_s,
        submitted=environment.submitted,
        finished=environment.finished.total(),
        busy_s=environment.ran.sum_s,
        ready=round(environment.workers),
        ready_slots=round(environment.slots),
        busy_slots=round(environment.busy),
        idle_workers=sum(name in environments_in(info_of(row.info)) for row in idle),
        starting_s=ordered.starting_s,
        started_s=ordered.started_s,
        order=ordered.order,
        held=environment.held,
    )
