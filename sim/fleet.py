"""Simulates a fleet: a queue, workers that start, are preempted and drain, and a policy.

Requests wait in order of submission. Waiting ones are only counted; running and returned ones are
objects. A worker that ends a request claims the next in the same moment. A request that comes to an
idle fleet goes to any worker with a free slot. All chance comes from the seed, one stream for each
purpose, so policies meet the same arrivals.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from leanq.scale import Stats
from sim.parts import Given, Outcome, Policy, Running, View, Worker
from sim.scenarios import Scenario, Span

TICK_S = 15.0
START_MEDIAN_S, START_SIGMA, START_MOST_S = 75.0, 0.5, 600.0
GRACE_S = 15.0
LEASE_S = 10.0
ATTEMPTS = 3


class Fleet:
    """One run of a scenario under a policy, from a seed."""

    def __init__(self, scenario: Scenario, policy: Policy, seed: int, *, idle_first: bool) -> None:
        self._scenario = scenario
        self._policy = policy
        self._idle_first = idle_first
        self._arrivals_chance, self._work, self._starts, self._fate, self._choice = (
            Random(f"{purpose} {scenario.name} {seed}")
            for purpose in ("arrivals", "work", "starts", "fate", "choice")
        )
        sigma = math.sqrt(math.log(1 + scenario.spread**2))
        self._sigma, self._shift = sigma, sigma * sigma / 2
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._queue: deque[list[Any]] = deque()  # [when, how many]
        self._given: deque[Given] = deque()
        self._waiting = 0
        self._free: list[Worker] = []
        self._workers: dict[Worker, None] = {}
        self._order = scenario.workers
        self._ready = self._using = 0  # workers; slots that use a CPU
        self._leased = 0
        self._submitted = self._finished = self._lost = 0
        self._busy_s = self._cpu_s = self._ready_slot_s = self._slot_s = 0.0
        self._waits: list[float] = []
        self._started: list[float] = []
        self._seen = Stats(time_s=0.0)
        self._marked, self._marked_s = 0, 0.0
        self._clear_s: float | None = None
        self._orders = [(0.0, self._order)]
        self._lengths: list[tuple[float, int]] = []
        self._most = 0

    def run(self) -> Outcome:
        scenario = self._scenario
        for _ in range(self._order):
            self._start_worker(warm=True)
        for at_s, share in scenario.storms:
            self._at(at_s, self._storm, share)
        for span in scenario.outages:
            self._at(span[1], self._back, None)
        for span in scenario.restarts:
            self._at(span[0], lambda _: self._policy.restart(), None)
        self._at(0.001, self._tick, None)
        arrivals = iter(scenario.arrivals(self._arrivals_chance))
        coming = next(arrivals, None)
        events, until = self._events, scenario.until_s
        while True:
            if coming and coming[0] <= events[0][0]:
                if coming[0] > until:
                    break
                self._pass(coming[0])
                self._submit(coming[1])
                coming = next(arrivals, None)
                continue
            at, _, act, what = heapq.heappop(events)
            if at > until:
                break
            self._pass(at)
            act(what)
        self._pass(until)
        return self._outcome()

    def _at(self, when: float, act: Callable[[Any], None], what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act, what))

    def _pass(self, now: float) -> None:
        self._cpu_s += self._using * (now - self._now)
        self._now = now

    # Requests

    def _submit(self, count: int) -> None:
        self._submitted += count
        self._waiting += count
        if self._queue and self._queue[-1][0] == self._now:
            self._queue[-1][1] += count
        else:
            self._queue.append([self._now, count])
        mark = self._scenario.mark_s
        if mark is not None and self._now <= mark:
            self._marked += count
            self._marked_s = self._now
        self._hand_out()

    def _hand_out(self) -> None:
        if self._out(self._scenario.outages):
            return
        free = self._free
        while self._waiting and free:
            self._claim(free[int(self._choice.random() * len(free))])

    def _claim(self, worker: Worker) -> None:
        if self._given:
            given = self._given.popleft()
            submitted, work, attempts = given.submitted_s, given.work_s, given.attempts
        else:
            first = self._queue[0]
            submitted, attempts = first[0], 0
            if first[1] == 1:
                self._queue.popleft()
            else:
                first[1] -= 1
            mean = self._scenario.work_s(submitted)
            work = mean * math.exp(self._work.gauss(0.0, 1.0) * self._sigma - self._shift)
        self._waiting -= 1
        self._leased += 1
        self._using += 1
        self._count += 1
        worker.running[self._count] = Running(submitted, self._now, work, attempts)
        event = (self._now + work, self._count, self._end, (worker, self._count))
        heapq.heappush(self._events, event)
        if worker.place >= 0 and len(worker.running) >= self._scenario.slots:
            self._full(worker)

    def _end(self, what: tuple[Worker, int]) -> None:
        worker, number = what
        running = worker.running.get(number)
        if running is None:
            return  # its worker vanished
        if back := self._out(self._scenario.outages):
            # The worker keeps the result until there is a server to take it.
            if not running.blocked:
                running.blocked = True
                self._using -= 1
            self._at(back + self._choice.random(), self._end, what)
            return
        del worker.running[number]
        if not running.blocked:
            self._using -= 1
        self._leased -= 1
        self._finished += 1
        self._busy_s += running.work_s
        self._waits.append(running.claimed_s - running.submitted_s)
        mark = self._scenario.mark_s
        if mark is not None and running.submitted_s <= mark:
            self._marked -= 1
            if not self._marked and self._now > mark:
                self._clear_s = self._now - self._marked_s
        if worker.leaving:
            if not worker.running:
                self._remove(worker)
        elif self._waiting:
            self._claim(worker)
        elif worker.place < 0:
            worker.place = len(self._free)
            self._free.append(worker)

    def _give_back(self, requests: list[Running], died: int) -> None:
        for running in requests:
            self._leased -= 1
            attempts = running.attempts + died
            if attempts >= ATTEMPTS:
                self._lost += 1
                continue
            self._waiting += 1
            self._given.append(Given(running.submitted_s, running.work_s, attempts))
        self._hand_out()

    # Workers

    def _start_worker(self, *, warm: bool = False) -> None:
        worker = Worker(self._now)
        self._workers[worker] = None
        self._most = max(self._most, len(self._workers))
        if not warm and (until := self._out(self._scenario.stock_outs)):
            self._at(until + 1e-3, self._machine, worker)
        else:
            self._machine(worker, warm=warm)

    def _machine(self, worker: Worker, *, warm: bool = False) -> None:
        if worker.gone:
            return
        worker.billed_s = self._now
        drawn = START_MEDIAN_S * math.exp(START_SIGMA * self._starts.gauss(0.0, 1.0))
        takes = 0.0 if warm else min(START_MOST_S, drawn)
        self._at(self._now + takes, self._is_ready, worker)
        self._at(self._now + self._fate.expovariate(1 / self._scenario.life_s), self._doom, worker)

    def _is_ready(self, worker: Worker) -> None:
        if worker.gone or worker.leaving:
            return
        worker.ready_s = self._now
        if self._now > worker.ordered_s:
            self._started.append(self._now - worker.ordered_s)
        self._ready += 1
        worker.place = len(self._free)
        self._free.append(worker)
        self._hand_out()

    def _full(self, worker: Worker) -> None:
        last = self._free.pop()
        if last is not worker:
            self._free[worker.place] = last
            last.place = worker.place
        worker.place = -1

    def _doom(self, worker: Worker) -> None:
        """Preempts a worker: every other time with 15 seconds' notice, otherwise without."""
        if worker.gone or worker.leaving:
            return
        if self._fate.random() < 0.5:
            self._terminate(worker)
        else:
            lost = self._remove(worker)
            self._at(self._now + LEASE_S, lambda many: self._give_back(many, 1), lost)
        self._fill()

    def _terminate(self, worker: Worker) -> None:
        """Lets a worker claim no more; it goes when it is idle or its grace is over."""
        worker.leaving = True
        if worker.ready_s is not None:
            self._ready -= 1
        if worker.place >= 0:
            self._full(worker)
        if worker.running:
            self._at(self._now + GRACE_S, self._evict, worker)
        else:
            self._remove(worker)

    def _evict(self, worker: Worker) -> None:
        if not worker.gone:
            self._give_back(self._remove(worker), 0)

    def _remove(self, worker: Worker) -> list[Running]:
        """Removes a worker; returns the requests that it ran."""
        worker.gone = True
        del self._workers[worker]
        if worker.place >= 0:
            self._full(worker)
        if worker.ready_s is not None and not worker.leaving:
            self._ready -= 1
        if worker.billed_s is not None:
            self._slot_s += (self._now - worker.billed_s) * self._scenario.slots
        lost = list(worker.running.values())
        self._using -= sum(not running.blocked for running in lost)
        worker.running.clear()
        return lost

    def _storm(self, share: float) -> None:
        there = [w for w in self._workers if not w.leaving and w.billed_s is not None]
        for worker in self._fate.sample(there, int(len(there) * share)):
            self._doom(worker)

    def _fill(self) -> None:
        """Does the cluster's part: starts as many workers as are ordered."""
        there = [worker for worker in self._workers if not worker.leaving]
        for _ in range(self._order - len(there)):
            self._start_worker()
        if len(there) > self._order:
            draw = self._choice.random
            there.sort(
                key=lambda w: (
                    w.ready_s is not None,
                    len(w.running) if self._idle_first and w.ready_s is not None else 0,
                    draw(),
                )
            )
            for worker in there[: len(there) - self._order]:
                self._terminate(worker)

    # The policy

    def _tick(self, _: None) -> None:
        self._ready_slot_s += self._ready * self._scenario.slots * TICK_S
        self._lengths.append((self._now, self._waiting))
        if not self._out(self._scenario.restarts):
            order = self._policy(self._view())
            if order != self._order:
                self._order = order
                self._orders.append((self._now, order))
        self._fill()
        self._at(self._now + TICK_S, self._tick, None)

    def _view(self) -> View:
        if self._out(self._scenario.outages):
            self._seen = replace(self._seen, age_s=self._now - self._seen.time_s, order=self._order)
        else:
            self._seen = self._stats()
        return View(
            self._now, self._seen, self._cpu_s, self._ready_slot_s, self._order, self._ready
        )

    def _stats(self) -> Stats:
        bundle, slots = self._scenario.bundle, self._scenario.slots
        ready = [w for w in self._workers if w.ready_s is not None and not w.leaving]
        heads = [self._queue[0][0]] if self._queue else []
        heads += [self._given[0].submitted_s] if self._given else []
        started, self._started = tuple(self._started), []
        return Stats(
            time_s=self._now,
            queued=self._waiting * bundle,
            leased=self._leased * bundle,
            oldest_s=self._now - min(heads, default=self._now),
            submitted=self._submitted * bundle,
            finished=self._finished * bundle,
            busy_s=self._busy_s * bundle,
            ready=len(ready),
            ready_slots=len(ready) * slots * bundle,
            busy_slots=sum(len(w.running) for w in ready) * bundle,
            idle_workers=sum(not w.running for w in ready),
            starting_s=tuple(
                self._now - w.ordered_s
                for w in self._workers
                if w.ready_s is None and not w.leaving
            ),
            started_s=started,
            order=self._order,
        )

    def _out(self, spans: tuple[Span, ...]) -> float:
        """Returns when the present outage ends; 0 if there is none."""
        for first, last in spans:
            if first <= self._now < last:
                return last
        return 0.0

    def _back(self, _: None) -> None:
        self._hand_out()

    def _outcome(self) -> Outcome:
        for worker in list(self._workers):
            if worker.billed_s is not None:
                self._slot_s += (self._now - worker.billed_s) * self._scenario.slots
        # Waiting requests have waited at least so long.
        for submitted, count in self._queue:
            self._waits += [self._now - submitted] * count
        self._waits += [self._now - given.submitted_s for given in self._given]
        orders = [order for _, order in self._orders]
        steps = [b > a for a, b in pairwise(orders)]
        return Outcome(
            waits_s=sorted(self._waits),
            submitted=self._submitted,
            finished=self._finished,
            lost=self._lost,
            left=self._waiting + self._leased,
            work_s=self._busy_s,
            slot_s=self._slot_s,
            reversals=sum(a != b for a, b in pairwise(steps)),
            most_workers=self._most,
            clear_s=self._clear_s,
            orders=self._orders,
            queue=self._lengths,
        )
