"""Decides how many workers a fleet needs: ``decide(stats, settings)``, a pure function."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from leanq.errors import UsageError

LONG_S = 600.0
"""How long samples are kept."""
LEARNED_REQUESTS = 20
"""After so many requests, their measured work counts."""

DecisionReason = Literal[
    "stale",  # the statistics are too old to act on: held
    "cold",  # too little is known to take workers away: held
    "backlog",  # more, or the backlog misses its deadline
    "load",  # more, for the arrivals
    "starting",  # more workers are needed, and about to start: held
    "enough",  # held
    "settling",  # fewer would do, but not for long enough yet: held
    "busy",  # fewer would do, but none is idle: held
    "idle",  # fewer
    "empty",  # none, because nothing waits and nothing runs
    "min_workers",  # more than would do: the settings' minimum
    "max_workers",  # less than is needed: the settings' maximum
]


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """An operator's settings for an environment. Workers are whole numbers, times are seconds.

    Attributes:
        slots: how many a worker has, assumed while no worker is there to say it.
        min_workers, max_workers: bounds of the order; the first may be 0.
        deadline_s: the time in which to clear a backlog.
        margin: the part of the deadline that the policy plans with.
        work_s: slot seconds per request, assumed until requests have finished.
        start_s: from ordering a worker until it is ready, assumed until some have started.
        drain_s: the time that the target gives a leaving worker to end its requests.
        spread: reserve for an uneven load, in square roots of the load.
        scale_down_delay_s: how long a small excess has to last before workers go. An excess of more
            than half the fleet has to last only as long as a start.
        stale_s: the policy ignores older statistics.
    """

    slots: int = 1
    min_workers: int = 0
    max_workers: int = 1000
    deadline_s: float = 300.0
    margin: float = 0.75
    work_s: float = 4.0
    start_s: float = 75.0
    drain_s: float = 15.0
    spread: float = 0.5
    scale_down_delay_s: float = 240.0
    stale_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.max_workers < 1 or self.slots < 1:
            raise UsageError(
                "expected 0 ≤ min_workers ≤ max_workers with max_workers and slots at least 1, "
                f"got {self.min_workers}, {self.max_workers} and {self.slots}"
            )
        for name in ("deadline_s", "margin", "work_s", "start_s", "drain_s", "stale_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if not (self.spread >= 0 and self.scale_down_delay_s >= 0):
            raise UsageError("spread and scale_down_delay_s must not be negative")


@dataclass(frozen=True, slots=True)
class Stats:
    """The known facts of an environment at one moment.

    Attributes:
        time_s: when they were taken, by a clock of which only differences matter.
        queued, leased: requests that wait, and requests that a worker has claimed.
        oldest_s: how long the oldest has waited.
        submitted, finished: how many requests, in all.
        held: requests that operators hold back.
        busy_s: slot seconds of all finished requests.
        ready, ready_slots: workers that claim, and their slots.
        busy_slots, idle_workers: slots that run something, and workers that run nothing.
        starting_s: ages of the workers that were ordered and are not ready.
        started_s: start times of the workers that became ready since the last decision.
        order: the number of workers wanted so far.
    """

    time_s: float
    queued: int = 0
    leased: int = 0
    oldest_s: float = 0.0
    submitted: int = 0
    finished: int = 0
    busy_s: float = 0.0
    ready: int = 0
    ready_slots: int = 0
    busy_slots: int = 0
    idle_workers: int = 0
    starting_s: tuple[float, ...] = ()
    started_s: tuple[float, ...] = ()
    order: int = 0
    age_s: float = 0.0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The statistics of one decision.

    Attributes:
        worked_s: slot seconds since the first sample, also of unfinished requests.
        unfinished_s: the part of them that no finished request accounts for.
    """

    stats: Stats
    worked_s: float = 0.0
    unfinished_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The facts that one decision leaves to the next. A new scaler's memory is empty.

    Attributes:
        samples: of the past ten minutes, oldest first.
        work_s: slot seconds per request, once enough have finished.
        enough: how many workers would have sufficed, and when.
    """

    samples: tuple[Sample, ...] = ()
    starts_s: tuple[float, ...] = ()
    work_s: float | None = None
    enough: tuple[tuple[float, int], ...] = ()

    @property
    def known_s(self) -> float:
        """The time between the first sample and the last."""
        return self.samples[-1].stats.time_s - self.samples[0].stats.time_s if self.samples else 0.0

    def since(self, seconds: float) -> Sample:
        """Returns the oldest sample of the past ``seconds``."""
        least = self.samples[-1].stats.time_s - seconds
        return next(sample for sample in self.samples if sample.stats.time_s >= least)


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers, and why: a word, a sentence, and every term by its name."""

    target: int
    reason: DecisionReason
    text: str
    terms: dict[str, float]
    memory: Memory


_STARTS_KEPT = 100
_GAP_S = 60.0


def learned(stats: Stats, memory: Memory) -> Memory:
    """Returns the memory with these statistics added."""
    samples, enough = memory.samples, memory.enough
    last = samples[-1].stats if samples else None
    # Start afresh if a failover lost the last writes, or another server has another clock:
    # differences across that mean nothing.
    if last and (
        stats.time_s <= last.time_s
        or stats.submitted < last.submitted
        or stats.finished < last.finished
        or stats.busy_s < last.busy_s
    ):
        samples, enough = (), ()
    now = _sampled(stats, samples[-1]) if samples else Sample(stats)
    samples = (*(s for s in samples if s.stats.time_s >= stats.time_s - LONG_S), now)
    finished = stats.finished - samples[0].stats.finished
    work_s = memory.work_s
    if finished >= LEARNED_REQUESTS:
        work_s = (now.worked_s - samples[0].worked_s) / finished
    starts = (*memory.starts_s, *stats.started_s)[-_STARTS_KEPT:]
    return replace(memory, samples=samples, starts_s=starts, work_s=work_s, enough=enough)


def _sampled(stats: Stats, last: Sample) -> Sample:
    # Finished work is known exactly, but late: a fleet with long requests would look idle until the
    # first one ends. So slots that are busy now and were before count as well. They do not count
    # after a long gap, since workers wait while their server is gone.
    span_s = stats.time_s - last.stats.time_s
    seen_s = min(last.stats.busy_slots, stats.busy_slots) * span_s if span_s <= _GAP_S else 0.0
    finished_s = stats.busy_s - last.stats.busy_s
    step_s = max(seen_s, finished_s - last.unfinished_s)
    # The begun work of vanished workers never finishes, and must not add up.
    most_s = stats.busy_slots * LONG_S
    unfinished_s = min(max(0.0, last.unfinished_s + step_s - finished_s), most_s)
    return Sample(stats, last.worked_s + step_s, unfinished_s)


_SHORT_S = 120.0
_RATE_WINDOWS = 8  # the arrival rate is the median over so many steps between decisions
_RATE_WINDOWS_LEAST = 4
# The assumed work per request weighs as much as so many finished requests.
_PRIOR_REQUESTS = 4.0
_STARTS_LEAST = 20
_SOON_S = 15.0
_MOST_STEP_DOWN = 0.5
# A smaller excess is noise, and costs less than ordering the workers again.
_LEAST_EXCESS = 0.03
# Workers whose requests take less than a third of the drain time lose next to nothing on leaving.
_DRAINS = 1 / 3


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of the deadline policy: slots, slot seconds and seconds, as the names say."""

    work_s: float
    careful_work_s: float
    requests_per_s: float
    load_slots: float
    base_slots: float
    backlog_slot_s: float
    start_s: float
    slow_start_s: float
    remaining_s: float
    capacity_slot_s: float
    clear_s: float
    slots_per_worker: float

    @property
    def short_slot_s(self) -> float:
        """The part of the backlog that the workers ordered so far will not clear in time."""
        return max(0.0, self.backlog_slot_s - self.capacity_slot_s)

    def workers(self, slots: float) -> int:
        return math.ceil(slots / self.slots_per_worker)

    def flat(self) -> dict[str, float]:
        terms = {name: float(getattr(self, name)) for name in self.__slots__}
        return terms | {"short_slot_s": self.short_slot_s}


def _terms(stats: Stats, settings: ScaleSettings, memory: Memory) -> _Terms:
    work_s, careful_work_s = _work(stats, settings, memory)
    rate = _rate(memory.samples)
    load = rate * work_s
    start_s, slow_start_s = _start(settings, memory.starts_s)
    per = stats.ready_slots / stats.ready if stats.ready_slots else float(settings.slots)
    # The floor keeps the deadline apart from a start. So a new worker's part until the deadline is
    # never less than what it was ordered for, and nothing is ordered twice.
    remaining_s = max(
        settings.margin * settings.deadline_s - stats.oldest_s,
        settings.deadline_s / 3 + slow_start_s,
    )
    ready = min(stats.ready_slots, stats.order * per)
    unseen = max(0, stats.order - stats.ready - len(stats.starting_s))
    ages = (*stats.starting_s, *(0.0 for _ in range(unseen)))
    # Expect an overdue worker soon, not never. Otherwise a provider that is out of stock gets order
    # upon order, and fills them all at once.
    started = sum(per * max(0.0, remaining_s - max(start_s - age, _SOON_S)) for age in ages)
    backlog = (stats.queued + max(0, stats.leased - stats.busy_slots)) * careful_work_s
    return _Terms(
        work_s=work_s,
        careful_work_s=careful_work_s,
        requests_per_s=rate,
        load_slots=load,
        base_slots=load + settings.spread * math.sqrt(load),
        backlog_slot_s=backlog,
        start_s=start_s,
        slow_start_s=slow_start_s,
        remaining_s=remaining_s,
        capacity_slot_s=(ready - load) * remaining_s + started,
        clear_s=backlog / max(1.0, ready - load),
        slots_per_worker=per,
    )


def _work(stats: Stats, settings: ScaleSettings, memory: Memory) -> tuple[float, float]:
    """Returns slot seconds per request, and the same with a discount for little evidence.

    Orders follow the second. If the evidence overstates the work, that saves money; if it
    understates the work, the order comes some ticks later.
    """
    believed_s = memory.work_s or settings.work_s
    if memory.work_s is None and stats.finished >= LEARNED_REQUESTS:
        believed_s = stats.busy_s / stats.finished  # a new scaler of an old fleet
    now = memory.samples[-1]

    def averaged(window_s: float) -> tuple[float, float]:
        first = memory.since(window_s)
        weight = now.stats.finished - first.stats.finished + _PRIOR_REQUESTS
        average_s = (now.worked_s - first.worked_s + _PRIOR_REQUESTS * believed_s) / weight
        return average_s, average_s * weight / (weight + math.sqrt(weight))

    long_s, careful_long_s = averaged(LONG_S)
    _, careful_short_s = averaged(_SHORT_S)
    return max(long_s, careful_short_s), max(careful_long_s, careful_short_s)


def _rate(samples: Sequence[Sample]) -> float:
    """Returns arrivals per second: a median, so that a burst is a backlog and not a load."""
    latest = samples[-_RATE_WINDOWS - 1 :]
    if len(latest) <= _RATE_WINDOWS_LEAST:
        return 0.0
    rates = []
    for before, after in pairwise(sample.stats for sample in latest):
        # No worker may start those that operators hold back.
        held = max(0, after.held - before.held)
        came = max(0, after.submitted - before.submitted - held)
        rates.append(came / (after.time_s - before.time_s))
    return statistics.median(rates)


def _start(settings: ScaleSettings, starts_s: Sequence[float]) -> tuple[float, float]:
    """Returns the seconds from order to ready: the median, and the fastest of the slowest tenth."""
    if len(starts_s) < _STARTS_LEAST:
        return settings.start_s, 2 * settings.start_s
    ranked = sorted(starts_s)
    # The wait for machines that were out of stock does not tell how long a start takes.
    most_s = settings.deadline_s / 3
    return min(statistics.median(ranked), most_s), min(ranked[len(ranked) * 9 // 10], most_s)


def by_deadline(stats: Stats, settings: ScaleSettings, memory: Memory) -> Decision:
    """Returns the policy's decision, without the settings' bounds; ``memory`` has ``stats``."""
    terms = _terms(stats, settings, memory)
    requests = stats.queued + stats.leased
    base = terms.workers(terms.base_slots)
    seen = (
        f"{stats.queued} wait and {stats.leased} run at {terms.work_s:.3g} s, "
        f"{terms.requests_per_s:.3g} more come per second; {_workers(stats.ready)} "
        f"ready, {stats.order} ordered; what waits is cleared in {terms.clear_s:.0f} s"
    )
    wanted = stats.order
    reason: DecisionReason = "backlog"
    if terms.clear_s > terms.start_s:
        extra = terms.short_slot_s / (terms.remaining_s - terms.slow_start_s)
        slots = min(stats.order * terms.slots_per_worker + extra, requests)
        wanted = max(wanted, terms.workers(slots))
    if requests and not wanted:
        wanted = 1
    # The load may move within the spread before an order follows it.
    if terms.load_slots > stats.order * terms.slots_per_worker and base > wanted:
        wanted, reason = base, "load"
    if wanted > stats.order:
        text = f"{seen}: {wanted - stats.order} more for the {reason}"
        return Decision(wanted, reason, text, terms.flat(), _noted(stats, settings, memory, wanted))
    # Give workers back only if the backlog would be gone without them before others could take
    # their place.
    enough = terms.workers(terms.load_slots + terms.backlog_slot_s / terms.start_s)
    enough = max(base, enough, min(requests, 1))
    memory = _noted(stats, settings, memory, enough)
    target, reason, why = _fewer(stats, settings, terms, memory)
    explained = terms.flat() | {"enough": float(enough)}
    return Decision(target, reason, f"{seen}: {why}", explained, memory)


def _noted(stats: Stats, settings: ScaleSettings, memory: Memory, enough: int) -> Memory:
    recent = (e for e in memory.enough if e[0] > stats.time_s - settings.scale_down_delay_s)
    return replace(memory, enough=(*recent, (stats.time_s, enough)))


def _fewer(
    stats: Stats, settings: ScaleSettings, terms: _Terms, memory: Memory
) -> tuple[int, DecisionReason, str]:
    """Returns the order or less, with the reason and its part of the sentence."""
    order = stats.order
    lasting = max(count for _, count in memory.enough)
    lately = max(c for at, c in memory.enough if at > stats.time_s - terms.start_s)
    # If less than half of a fleet is needed, it shrinks sooner, but keeps one worker: with none,
    # the next request waits for a start.
    goal, known_s = lasting, settings.scale_down_delay_s
    if lately <= order / 2:
        goal, known_s = min(lasting, max(lately, 1)), min(_SHORT_S, settings.scale_down_delay_s)
    now = memory.enough[-1][1]
    if now >= order:
        if terms.short_slot_s > 0 and stats.ready < order:
            return order, "starting", f"{_workers(order - stats.ready)} will start soon"
        return order, "enough", "enough"
    if goal > order * (1 - _LEAST_EXCESS):
        return order, "settling", f"{_workers(now)} would do, if that lasts"
    if memory.known_s < known_s:
        return order, "cold", f"{_workers(goal)} would do, but it is too soon to tell"
    idle = stats.idle_workers
    if terms.work_s <= settings.drain_s * _DRAINS:
        idle = int((stats.ready_slots - stats.busy_slots) / terms.slots_per_worker)
    idle += max(0, order - stats.ready)
    target = max(goal, order - min(idle, max(1, int(order * _MOST_STEP_DOWN))))
    if target == order:
        return order, "busy", f"{_workers(goal)} would do, but none is idle"
    if target == 0:
        return 0, "empty", "nothing is to be done"
    return target, "idle", f"{_workers(goal)} would do, so {order - target} of the idle go"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def decide(stats: Stats, settings: ScaleSettings, memory: Memory | None = None) -> Decision:
    """Returns the number of workers that the environment should have.

    Statistics that are too old change nothing, not even the memory. Otherwise the target lies
    within the settings' bounds, whatever the order was.
    """
    memory = memory or Memory()
    if stats.age_s > settings.stale_s:
        text = f"the statistics are {stats.age_s:.0f} s old, so the order is held"
        return Decision(stats.order, "stale", text, {"age_s": stats.age_s}, memory)
    memory = learned(stats, memory)
    decision = by_deadline(stats, settings, memory)
    target = min(max(decision.target, settings.min_workers), settings.max_workers)
    if target == decision.target:
        return decision
    reason: DecisionReason = "min_workers" if target > decision.target else "max_workers"
    text = f"{decision.text}; the {reason} is {target}"
    return replace(decision, target=target, reason=reason, text=text)
