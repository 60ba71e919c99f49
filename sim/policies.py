"""The policies that size the simulated fleets: ours, the reference, and common autoscalers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import accumulate
from random import Random

from leanq.scale import Memory, ScaleSettings, Stats, decide, learned
from sim.fleet import GRACE_S, START_MEDIAN_S, TICK_S
from sim.parts import Policy, View
from sim.scenarios import Scenario

MOST = 1000
_CPU_WINDOW_S = 30.0
_TOLERANCE = 0.1
_STABILIZATION_S = 300.0
_COOLDOWN_S = 300.0
_DRAINS = 1 / 3
_MINUTE_S = 60.0
# The reference clears a backlog within so many minutes, and ignores older statistics.
_CLEAR_MIN, _STALE_S = 5.0, 60.0


class Deadline:
    """``decide()`` with its defaults."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._memory = Memory()

    def __call__(self, view: View) -> int:
        decision = decide(view.stats, self._settings, self._memory)
        self._memory = decision.memory
        return decision.target

    def restart(self) -> None:
        self._memory = Memory()


class Autoscaler:
    """Bounds a desired number as Kubernetes' HPA does: tolerance, steps up, stabilization down.

    It uses the defaults of the HPA's v2 API. It steps up by as many workers as there are, or by 4,
    every 15 s. It steps down to the largest recommendation of the past 300 s. A restart of our
    scaler does not touch it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._recommended: list[tuple[float, int]] = []

    def bounded(self, now_s: float, order: int, desired: int, least: int) -> int:
        self._recommended = [
            *(r for r in self._recommended if r[0] > now_s - _STABILIZATION_S),
            (now_s, desired),
        ]
        if desired < order:
            desired = min(order, max(count for _, count in self._recommended))
        desired = min(desired, max(2 * order, order + 4))
        return max(least, min(desired, self._most))


class ByCPU:
    """An HPA on CPU, with a target for the average use of ready workers."""

    def __init__(self, slots: int, most: int, target: float = 0.9) -> None:
        self._slots, self._target = slots, target
        self._autoscaler = Autoscaler(most)
        self._seen: list[tuple[float, float, float]] = []

    def __call__(self, view: View, least: int = 1) -> int:
        self._seen = [
            *(s for s in self._seen if s[0] >= view.now_s - _CPU_WINDOW_S),
            (view.now_s, view.cpu_s, view.ready_slot_s),
        ]
        order = max(view.order, 1)
        there_s = view.ready_slot_s - self._seen[0][2]
        desired = order
        if there_s:
            ratio = (view.cpu_s - self._seen[0][1]) / there_s / self._target
            desired = self._desired(ratio, view.ready, order)
        return self._autoscaler.bounded(view.now_s, order, desired, least)

    @staticmethod
    def _desired(ratio: float, ready: int, order: int) -> int:
        if abs(ratio - 1) <= _TOLERANCE:
            return order
        if ratio > 1 and ready < order:
            # Unready workers count as unused; that may cancel the step up.
            ratio *= ready / order
            return order if ratio <= 1 + _TOLERANCE else math.ceil(ratio * order)
        return math.ceil(ratio * ready)

    def restart(self) -> None:
        """Keeps its memory, which belongs to the cluster."""


def by_reference(stats: Stats, memory: Memory, most: int) -> tuple[int, Memory]:
    """Returns how many workers the reference policy wants, from 1 to ``most``, and its memory.

    It counts the requests finished in the past minute. If none finished, it holds the order. If
    fewer wait than a minute finishes, it leaves the fleet to the CPU's autoscaler.
    """
    if stats.age_s > _STALE_S:
        return min(max(stats.order, 1), most), memory
    memory = learned(stats, memory)
    first = memory.since(_MINUTE_S).stats
    span_s = stats.time_s - first.time_s
    rate = (stats.finished - first.finished) * _MINUTE_S / span_s if span_s else 0.0
    past = (sample.stats for sample in memory.samples)
    workers = statistics.fmean(each.ready for each in past if each.time_s >= first.time_s)
    if not stats.queued or stats.queued < rate:
        wanted = 1
    elif not rate or not workers:
        wanted = stats.order
    else:
        wanted = math.ceil((rate + stats.queued / _CLEAR_MIN) / (rate / workers))
    return min(max(wanted, 1), most), memory


class Reference:
    """The reference policy as the HPA's minimum, and the HPA on CPU above it.

    It decides once a minute, since its statistics cover a minute. If it decided more often, it
    would see a burst with the completions of the time before, and order ten times as many.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._most = most
        self._memory = Memory()
        self._by_cpu = ByCPU(slots, most)
        self._least, self._next_s = 1, 0.0

    def __call__(self, view: View) -> int:
        wanted, self._memory = by_reference(view.stats, self._memory, self._most)
        if view.now_s >= self._next_s:
            self._next_s = view.now_s + 60 - TICK_S / 2
            self._least = wanted
        return self._by_cpu(view, self._least)

    def restart(self) -> None:
        self._memory = Memory()


class Keda:
    """KEDA on a Redis list, with its default of 5 waiting requests per worker, from and to zero."""

    def __init__(self, most: int, per_worker: int = 5) -> None:
        self._per_worker = per_worker
        self._autoscaler = Autoscaler(most)
        self._active_s = 0.0

    def __call__(self, view: View) -> int:
        queued, order = view.stats.queued, view.order
        if view.stats.age_s > 0:
            return order
        if queued:
            self._active_s = view.now_s
        if not order:
            return int(queued > 0)
        if not queued and view.now_s - self._active_s >= _COOLDOWN_S:
            return 0
        ratio = queued / self._per_worker / order
        desired = order if abs(ratio - 1) <= _TOLERANCE else math.ceil(queued / self._per_worker)
        return self._autoscaler.bounded(view.now_s, order, desired, 1)

    def restart(self) -> None:
        """Keeps its metrics, which come from the cluster's own operator."""


class Oracle:
    """Knows all arrivals and the mean work, and orders a start ahead.

    It orders enough to do all arrivals of any span of time by ``slack_s`` after the span. It also
    covers the load of a minute's arrivals and its square root. It gives nothing back while the
    queue is longer than a tick's work. Of workers with long requests it gives back only idle ones.
    """

    slack_s = 300.0
    _spans = (1, 4, 8, 20, 40)

    def __init__(self, scenario: Scenario, seed: int, most: int) -> None:
        self._slots, self._bundle, self._most = scenario.slots, scenario.bundle, most
        work: dict[int, float] = {}
        for at_s, count in scenario.arrivals(Random(f"arrivals {scenario.name} {seed}")):
            tick = int(at_s // TICK_S)
            work[tick] = work.get(tick, 0.0) + count * scenario.work_s(at_s)
        ticks = int(scenario.until_s // TICK_S) + 200
        self._sums = [0.0, *accumulate(work.get(tick, 0.0) for tick in range(ticks))]
        self._work_s = scenario.work_s

    def _needed(self, tick: int) -> float:
        sums, last = self._sums, len(self._sums) - 1
        start = min(tick, last)
        spans = (
            (sums[min(start + n, last)] - sums[start]) / (n * TICK_S + self.slack_s)
            for n in self._spans
        )
        load = (sums[min(start + 4, last)] - sums[start]) / (4 * TICK_S)
        past = (sums[start] - sums[max(0, start - 20)]) / (20 * TICK_S)
        usual = min(load, past) if load > 3 * past else load
        return max(*spans, usual + math.sqrt(usual))

    def __call__(self, view: View) -> int:
        tick = int(view.now_s // TICK_S)
        ahead = range(tick, tick + math.ceil(2 * START_MEDIAN_S / TICK_S))
        slots = max(map(self._needed, ahead))
        left = view.stats.queued / self._bundle * self._work_s(view.now_s)
        slots = max(slots, left / self.slack_s)
        order = max(math.ceil(slots / self._slots), int(view.stats.leased > 0))
        if left > self._slots * view.order * TICK_S or view.order * 0.9 < order:
            order = max(order, view.order)
        if self._work_s(view.now_s) > GRACE_S * _DRAINS:
            order = max(order, view.order - view.stats.idle_workers)
        return min(self._most, order)

    def restart(self) -> None:
        """Loses nothing, since it knows everything."""


def policies(scenario: Scenario, seed: int) -> dict[str, Callable[[], Policy]]:
    """Returns a maker for each policy by its name, ours first."""
    most = MOST if scenario.bundle == 1 else 500_000 // (scenario.slots * scenario.bundle)
    slots = scenario.slots * scenario.bundle
    ours = ScaleSettings(slots=slots, max_workers=most)
    return {
        "deadline": lambda: Deadline(ours),
        "reference": lambda: Reference(slots, most),
        "HPA 90 %": lambda: ByCPU(slots, most),
        "KEDA 5": lambda: Keda(most),
        "oracle": lambda: Oracle(scenario, seed, most),
    }
