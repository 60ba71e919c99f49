"""The deadline law."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .values import LEARNED_REQUESTS, LONG_S, Decision, Memory, Reason, Sample, ScaleSettings, Stats

_SHORT_S = 120.0
_RATE_WINDOWS = 8  # the arrival rate is the median of so many steps between decisions
_RATE_WINDOWS_LEAST = 4
# What is believed of the work before anything finished weighs as much as so many requests.
_PRIOR_REQUESTS = 4.0
_STARTS_LEAST = 20
_SOON_S = 15.0
_MOST_STEP_DOWN = 0.5
# Less than that many of the workers too much is noise, and costs less than to order them again.
_LEAST_EXCESS = 0.03
# Workers whose requests end in a third of the time to drain lose next to nothing when told to go.
_DRAINS = 1 / 3


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of the deadline law: slots, slot seconds and seconds, as the names say."""

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
        """The part of the backlog that nobody who is ordered will have done in time."""
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
    # The floor keeps the last part apart from a start: what a new worker will do until the deadline
    # is then never less than what it was ordered for, and so nothing is ordered twice.
    remaining_s = max(
        settings.margin * settings.deadline_s - stats.oldest_s,
        settings.deadline_s / 3 + slow_start_s,
    )
    ready = min(stats.ready_slots, stats.order * per)
    unseen = max(0, stats.order - stats.ready - len(stats.starting_s))
    ages = (*stats.starting_s, *(0.0 for _ in range(unseen)))
    # One that is overdue is expected soon rather than never, or a provider that is out of stock
    # would be sent order upon order, and fill them all at once.
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
    """Slot seconds per request, and so many less as few requests may have misled about.

    Orders are given on the second: what little evidence overstates is paid for, what it understates
    is ordered some ticks later.
    """
    believed_s = memory.work_s or settings.work_s
    if memory.work_s is None and stats.finished >= LEARNED_REQUESTS:
        believed_s = stats.busy_s / stats.finished  # a new scaler of an old fleet
    now = memory.samples[-1]

    def averaged(window_s: float) -> tuple[float, float]:
        first = memory.since(window_s)
        weight = now.finished - first.finished + _PRIOR_REQUESTS
        average_s = (now.worked_s - first.worked_s + _PRIOR_REQUESTS * believed_s) / weight
        return average_s, average_s * weight / (weight + math.sqrt(weight))

    long_s, careful_long_s = averaged(LONG_S)
    _, careful_short_s = averaged(_SHORT_S)
    return max(long_s, careful_short_s), max(careful_long_s, careful_short_s)


def _rate(samples: Sequence[Sample]) -> float:
    """Arrivals per second: a median, so that a burst is a backlog and not a load."""
    latest = samples[-_RATE_WINDOWS - 1 :]
    if len(latest) <= _RATE_WINDOWS_LEAST:
        return 0.0
    return statistics.median(
        (after.submitted - before.submitted) / (after.time_s - before.time_s)
        for before, after in pairwise(latest)
    )


def _start(settings: ScaleSettings, starts_s: Sequence[float]) -> tuple[float, float]:
    """Seconds from order to ready: of the middle worker, and of the slowest tenth's first."""
    if len(starts_s) < _STARTS_LEAST:
        return settings.start_s, 2 * settings.start_s
    ranked = sorted(starts_s)
    # Machines that were out of stock say nothing about how long a start takes.
    most_s = settings.deadline_s / 3
    return min(statistics.median(ranked), most_s), min(ranked[len(ranked) * 9 // 10], most_s)


def by_deadline(stats: Stats, settings: ScaleSettings, memory: Memory) -> Decision:
    """What the law wants, without the settings' bounds; the memory has these statistics already."""
    terms = _terms(stats, settings, memory)
    requests = stats.queued + stats.leased
    base = terms.workers(terms.base_slots)
    seen = (
        f"{stats.queued} wait and {stats.leased} run at {terms.work_s:.3g} s, "
        f"{terms.requests_per_s:.3g} more come per second; {stats.ready} workers "
        f"are ready, {stats.order} ordered; what waits is cleared in {terms.clear_s:.0f} s"
    )
    wanted = stats.order
    reason: Reason = "backlog"
    if terms.clear_s > terms.start_s:
        extra = terms.short_slot_s / (terms.remaining_s - terms.slow_start_s)
        slots = min(stats.order * terms.slots_per_worker + extra, requests)
        wanted = max(wanted, terms.workers(slots))
    if requests and not wanted:
        wanted = 1
    # The spread is also what the load may move by before an order follows it.
    if terms.load_slots > stats.order * terms.slots_per_worker and base > wanted:
        wanted, reason = base, "load"
    if wanted > stats.order:
        text = f"{seen}: {wanted - stats.order} more for the {reason}"
        return Decision(wanted, reason, text, terms.flat(), _noted(stats, settings, memory, wanted))
    # Workers are given back only when what waits would be gone without them before others could
    # take their place.
    enough = terms.workers(terms.load_slots + terms.backlog_slot_s / terms.start_s)
    enough = max(base, enough, min(requests, 1))
    memory = _noted(stats, settings, memory, enough)
    target, reason, why = _fewer(stats, settings, terms, memory)
    explained = terms.flat() | {"enough": float(enough)}
    return Decision(target, reason, f"{seen}: {why}", explained, memory)


def _noted(stats: Stats, settings: ScaleSettings, memory: Memory, enough: int) -> Memory:
    recent = (e for e in memory.enough if e[0] > stats.time_s - settings.excess_s)
    return replace(memory, enough=(*recent, (stats.time_s, enough)))


def _fewer(
    stats: Stats, settings: ScaleSettings, terms: _Terms, memory: Memory
) -> tuple[int, Reason, str]:
    """The order or less, with the reason and its part of the sentence."""
    order = stats.order
    lasting = max(count for _, count in memory.enough)
    lately = max(c for at, c in memory.enough if at > stats.time_s - terms.start_s)
    # A fleet of which not half is needed goes sooner, down to one: none at all costs the next
    # request a start.
    goal, known_s = lasting, settings.excess_s
    if lately <= order / 2:
        goal, known_s = min(lasting, max(lately, 1)), min(_SHORT_S, settings.excess_s)
    now = memory.enough[-1][1]
    if now >= order:
        if terms.short_slot_s > 0 and stats.ready < order:
            return order, "starting", f"{order - stats.ready} workers are about to start"
        return order, "enough", "enough"
    if goal > order * (1 - _LEAST_EXCESS):
        return order, "settling", f"{now} would do, if that lasts"
    if memory.known_s < known_s:
        return order, "cold", f"{goal} would do, as far as is known by now"
    idle = stats.idle_workers
    if terms.work_s <= settings.drain_s * _DRAINS:
        idle = int((stats.ready_slots - stats.busy_slots) / terms.slots_per_worker)
    idle += max(0, order - stats.ready)
    target = max(goal, order - min(idle, max(1, int(order * _MOST_STEP_DOWN))))
    if target == order:
        return order, "busy", f"{goal} would do, but no worker is idle"
    if target == 0:
        return 0, "empty", "nothing is to be done"
    return target, "idle", f"{goal} would do, so {order - target} idle ones go"
