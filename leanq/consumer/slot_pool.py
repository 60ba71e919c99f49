"""The slots of a worker, which the consumers of all shards share.

It has three small parts, which can be tested alone: a counter of slots, averages of durations, and
a circuit breaker.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from leanq.errors import WorkerError
from leanq.queue.settings import Settings

# Claim ahead only if requests take less than this on average: beyond it a round trip hardly counts.
_SHORT_S = 0.05
_MAX_WAITING = 64
# The weight of the newest value in an average. One wait for a slot that is given up stops claiming
# ahead.
_NEWEST_WEIGHT = 0.2
# A request's attempts: a worker that is alone condemns the request that breaks it.
_FAILURES_IN_A_ROW = Settings.max_attempts


class SlotCounter:
    """Counts slots and the requests in them.

    Attributes:
        taken, isolated: requests that run, and those of them that let nothing run beside them.
        waiting: requests that were claimed ahead and wait for a slot.
        reserved: slots that a claim under way may fill.
        idle_since_s: the monotonic time at which the last request ended.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = self.waiting = self.reserved = self.isolated = 0
        self.idle_since_s = time.monotonic()

    @property
    def free(self) -> int:
        return self.count - self.taken

    def take(self, *, isolated: bool) -> None:
        self.taken += 1
        self.isolated += isolated

    def give(self, *, isolated: bool) -> None:
        self.taken -= 1
        self.isolated -= isolated
        self.idle_since_s = time.monotonic()

    @contextlib.contextmanager
    def reserve(self, number: int) -> Iterator[None]:
        self.reserved += number
        try:
            yield
        finally:
            self.reserved -= number


class Average:
    """Keeps a moving average of durations, in seconds; it is 0 before the first."""

    def __init__(self) -> None:
        self.value_s = 0.0

    def add(self, seconds: float) -> None:
        if self.value_s:
            self.value_s += _NEWEST_WEIGHT * (seconds - self.value_s)
        else:
            self.value_s = seconds


class CircuitBreaker:
    """Keeps a failing machine from claiming, and ends its worker if the failures go on.

    Attributes:
        paused_until_s: the time by ``clock`` before which nothing is claimed.
        quarantined: nothing is claimed until Lean is known to work here again.
        fault: the last of several failures in a row, after which the worker should end.
    """

    def __init__(self, pause_s: float, clock: Callable[[], float]) -> None:
        self.paused_until_s = 0.0
        self.quarantined = False
        self.fault: WorkerError | None = None
        self._pause_s = pause_s
        self._clock = clock
        self._failures = 0

    @property
    def closed(self) -> bool:
        return not self.quarantined and self._clock() >= self.paused_until_s

    def pause(self, seconds: float) -> None:
        self.paused_until_s = self._clock() + seconds

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, error: WorkerError) -> None:
        self._failures += 1
        self.pause(self._pause_s)
        if self._failures >= _FAILURES_IN_A_ROW:
            self.fault = error

    def quarantine(self, error: WorkerError) -> None:
        """Stops claims: Lean does not work here. Requests then running count as one failure."""
        if not self.quarantined:
            self.quarantined = True
            self.failed(error)


class SlotPool:
    """Says how much the consumers of a worker may claim, from the three parts and two switches.

    A consumer with much to claim leaves a part of the free slots to those that wait for their turn.

    Attributes:
        run_time, call_time: how long a request and a call to the server take on average.
        draining: nothing is claimed any more.
        emptying: all requests should end, so that a quarantined one can run isolated.

    ``changed`` is called when more may be claimed than before.
    """

    def __init__(
        self,
        count: int,
        changed: Callable[[], None],
        *,
        pause_after_failure_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = SlotCounter(count)
        self.breaker = CircuitBreaker(pause_after_failure_s, clock)
        self.run_time, self.call_time = Average(), Average()
        self.draining = self.emptying = False
        # Consumers that want to claim, in the order in which they asked.
        self._turns = deque[object]()
        self._changed = changed

    @property
    def available(self) -> int:
        """Returns how many more requests could run now."""
        return self.slots.free if self.may_claim else 0

    @property
    def may_claim(self) -> bool:
        """Returns whether requests may be claimed if a slot is free."""
        if self.draining or self.slots.isolated or (self.emptying and self.slots.taken):
            return False
        return self.breaker.closed

    def quarantine(self, error: WorkerError) -> None:
        """Stops claims until Lean works here again."""
        self.breaker.quarantine(error)
        self._changed()

    def share(self, consumer: object, *, ahead: bool) -> int:
        """Returns how many requests the consumer, which wants some, may claim now.

        ``ahead``: also count slots that will soon be free, if requests are short.
        """
        if consumer not in self._turns:
            self._turns.append(consumer)
        if self._turns[0] is not consumer or not self.may_claim:
            return 0
        free = self.available - self.slots.reserved
        if ahead:
            free += self._max_waiting - self.slots.waiting
        return max(0, -(-free // len(self._turns)))

    @property
    def _max_waiting(self) -> int:
        # All slots may become free at once, so one request waits for each, and more if several
        # would run during one call to the server.
        run_s = self.run_time.value_s
        if not 0 < run_s < _SHORT_S:
            return 0
        return min(_MAX_WAITING, self.slots.count * math.ceil(self.call_time.value_s / run_s))

    def end_turn(self, consumer: object) -> None:
        """Ends the turn of a consumer that has claimed or cannot."""
        if consumer in self._turns:
            self._turns.remove(consumer)
            if self._turns:
                self._changed()

    def give(self, *, isolated: bool) -> None:
        self.slots.give(isolated=isolated)
        self._changed()
