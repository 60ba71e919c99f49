"""What one worker holds: the requests that run, what is finished, and what goes back.

Nothing here speaks to the queue. The worker's consumer starts jobs, takes results and returns away
to tell the server, and drops what the server says is no longer its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from leanq.errors import NewerMessageError, WireError, WorkerError
from leanq.fleet import logging as logs
from leanq.lean.driver import Driver
from leanq.queue import wire
from leanq.queue.metrics import count
from leanq.queue.requests import LEAN_VERDICTS, Reply
from leanq.queue.results import Job, Returning, Settlement, times_of

log = logging.getLogger("leanq.worker")

# A call is bounded in bytes, since a script that moves megabytes holds everybody up.
_SETTLE_BYTES = 1 << 20
_FAILURES_IN_A_ROW = 3
_PAUSE_AFTER_FAILURE_S = 2.0
_PAUSE_AFTER_DEFERRING_S = 0.5
CLAIMED_AHEAD_WAIT_S = 0.25
"""What was claimed ahead is given back when it has waited so long for a slot, in seconds."""

# Requests are claimed ahead only where they take less than this on average: beyond it a round trip
# hardly counts.
_SHORT_S = 0.05
_MOST_WAITING = 64
# Of an average over time, the weight of the newest. One that takes CLAIMED_AHEAD_WAIT_S ends all
# shortness.
_NEWEST = 0.2


class SlotPool:
    """The slots of a worker, which the consumers of its shards share.

    Pumps that want work take turns, and each may claim its part of what is free, so that a shard
    with much work leaves some room to the others.

    Attributes:
        taken: requests that run.
        waiting: requests that were claimed ahead, for when a slot is free.
        closed: nothing is claimed any more.
        on_hold: all should come to an end, so that a quarantined request can run alone.
        fault: set after several failures in a row, when the worker should end rather than churn.

    Args:
        count: requests at a time.
        changed: called when there may be more room than before.
    """

    def __init__(self, count: int, changed: Callable[[], None]) -> None:
        self.count = count
        self.taken = self.waiting = 0
        self.closed = self.on_hold = False
        self.fault: WorkerError | None = None
        self.paused_until_s = 0.0
        self._changed = changed
        self._reserved = 0
        self._isolated = 0
        self._failures = 0
        self._turns: deque[object] = deque()
        self._run_s = self._call_s = 0.0

    @property
    def vacant(self) -> int:
        """How many more requests could run now."""
        return self.count - self.taken if self._open else 0

    @property
    def _open(self) -> bool:
        if self.closed or self._isolated or (self.on_hold and self.taken):
            return False
        return time.monotonic() >= self.paused_until_s

    def share(self, consumer: object, *, ahead: bool) -> int:
        """How many requests the consumer, which wants some, may claim now; ``ahead``: also for when
        slots are free again, if requests are short."""
        if consumer not in self._turns:
            self._turns.append(consumer)
        if self._turns[0] is not consumer or not self._open:
            return 0
        free = self.vacant - self._reserved
        if ahead:
            free += self._most_waiting - self.waiting
        return max(0, -(-free // len(self._turns)))

    @property
    def _most_waiting(self) -> int:
        # One for each slot, since all may be free at the same moment, and the more of them the more
        # run while one call to the server is under way.
        if not 0 < self._run_s < _SHORT_S:
            return 0
        return min(_MOST_WAITING, self.count * math.ceil(self._call_s / self._run_s))

    def note_run(self, seconds: float) -> None:
        """A request took so long."""
        self._run_s = _averaged(self._run_s, seconds)

    def note_call(self, seconds: float) -> None:
        """A call to the server took so long."""
        self._call_s = _averaged(self._call_s, seconds)

    def end_turn(self, consumer: object) -> None:
        """The consumer has claimed, or cannot."""
        if consumer in self._turns:
            self._turns.remove(consumer)
            if self._turns:
                self._changed()

    @contextlib.contextmanager
    def reserved(self, number: int) -> Iterator[None]:
        """Keeps so much of what is vacant for a claim under way."""
        self._reserved += number
        try:
            yield
        finally:
            self._reserved -= number

    def take(self, *, isolated: bool) -> None:
        """A request runs."""
        self.taken += 1
        self._isolated += isolated

    def give(self, *, isolated: bool) -> None:
        """A request has ended."""
        self.taken -= 1
        self._isolated -= isolated
        self._changed()

    def pause(self, seconds: float) -> None:
        self.paused_until_s = time.monotonic() + seconds

    def succeed(self) -> None:
        """The machine has done its part."""
        self._failures = 0

    def fail(self, error: WorkerError) -> None:
        """The machine has failed; after several times in a row that is a fault."""
        self._failures += 1
        self.pause(_PAUSE_AFTER_FAILURE_S)
        if self._failures >= _FAILURES_IN_A_ROW:
            self.fault = error


@dataclass(slots=True, eq=False)
class _Held:
    """A request that this worker holds the lease of, until its end is settled; ``finished``: its
    driver has ended."""

    job: Job
    finished: bool = False


class Slots:
    """The requests of one shard; runs each in a task of its own, as soon as a slot is free.

    Attributes:
        returns: (request id, token) of requests that go back, by how they do.

    Args:
        worker: the worker's id, which stands in every reply.
        drivers: the driver of each environment.
        slot_pool: where they run.
        notify: called when something ended.
    """

    def __init__(
        self,
        worker: str,
        drivers: Mapping[str, Driver],
        slot_pool: SlotPool,
        notify: Callable[[], None],
    ) -> None:
        self.returns: dict[Returning, list[tuple[str, str]]]
        self.returns = {"keep": [], "charge": [], "defer": []}
        self._worker = worker
        self._drivers = drivers
        self._slot_pool = slot_pool
        self._notify = notify
        self._held: dict[str, _Held] = {}
        self._results: dict[str, Settlement] = {}
        # What was claimed ahead, and since when the first of it waits.
        self._waiting: deque[_Held] = deque()
        self._waiting_since_s = 0.0
        # What fills a slot: also what is no longer held, while its driver cleans up.
        self._running: dict[_Held, asyncio.Task[None]] = {}

    @property
    def held(self) -> list[Job]:
        """Every request whose lease is this worker's, finished or not."""
        return [held.job for held in self._held.values()]

    @property
    def has_results(self) -> bool:
        """Whether something is to be settled."""
        return bool(self._results)

    def start(self, job: Job) -> None:
        # It may run here already, for a lease that lapsed before anybody noticed.
        self.drop(job.request_id)
        held = self._held[job.request_id] = _Held(job)
        if self._slot_pool.taken < self._slot_pool.count:
            self._run(held)
            return
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append(held)
        self._slot_pool.waiting += 1

    @property
    def patient_until_s(self) -> float:
        """When to give back what still waits for a slot; monotonic."""
        return self._waiting_since_s + CLAIMED_AHEAD_WAIT_S if self._waiting else math.inf

    def return_waiting(self) -> None:
        """Gives back what waits for a slot, at no charge: others may be idle."""
        self.returns["keep"] += ((held.job.request_id, held.job.token) for held in self._waiting)
        self._slot_pool.waiting -= len(self._waiting)
        self._waiting.clear()

    def _run(self, held: _Held) -> None:
        self._slot_pool.take(isolated=held.job.isolated)
        self._running[held] = asyncio.get_running_loop().create_task(self._work(held))

    def drop(self, request_id: str) -> None:
        """Stops a request whose lease is gone: withdrawn, run timeout or reaped."""
        held = self.forget(request_id)
        if held is None:
            return
        self._cancel(held)
        self._notify()

    def forget(self, request_id: str) -> _Held | None:
        """The server has taken its end; nothing of it is kept."""
        self._results.pop(request_id, None)
        return self._held.pop(request_id, None)

    def next_settlements(self) -> list[Settlement]:
        """What is to be settled next: all that is finished, within the bytes of one call."""
        batch: list[Settlement] = []
        size = 0
        for item in self._results.values():
            if batch and size + len(item.reply) > _SETTLE_BYTES:
                break
            batch.append(item)
            size += len(item.reply)
        return batch

    def finished_beside(self, batch: list[Settlement]) -> int:
        """How many held requests are finished and not in ``batch``."""
        return sum(held.finished for held in self._held.values()) - len(batch)

    async def stop(self) -> None:
        """Stops all that runs, and waits until the drivers have cleaned up."""
        tasks = list(self._running.values())
        for held in list(self._running):
            self._cancel(held)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, held: _Held) -> None:
        if held in self._waiting:
            self._waiting.remove(held)
            self._slot_pool.waiting -= 1
        if task := self._running.get(held):
            task.cancel()
            # One that is cancelled before it ran could not do it itself.
            task.add_done_callback(lambda _: self._vacate(held))

    def _vacate(self, held: _Held) -> None:
        if self._running.pop(held, None):
            self._slot_pool.give(isolated=held.job.isolated)
            if self._waiting and self._slot_pool.taken < self._slot_pool.count:
                self._slot_pool.waiting -= 1
                self._waiting_since_s = time.monotonic()
                self._run(self._waiting.popleft())

    async def _work(self, held: _Held) -> None:
        job = held.job
        started_s = time.monotonic()
        about = {"request_id": job.request_id, "attempt": job.attempts, "worker": self._worker}
        logs.ABOUT.set({**about, "environment": job.environment})
        try:
            settlement = self._settlement(job, started_s, await self._answer(job))
        except NewerMessageError as error:
            # A newer release understands it. Without a pause it would only be claimed again.
            log.warning("%s is given back: %s", job.request_id, error)
            self._slot_pool.pause(_PAUSE_AFTER_DEFERRING_S)
            self._finish(held, "defer")
            return
        except WorkerError as error:
            # It goes back one attempt older, in case it is what breaks machines.
            log.error("%s: %s", type(error).__name__, error)
            self._slot_pool.fail(error)
            self._finish(held, "charge")
            return
        except Exception as error:
            # A fault of leanq's own would recur on every worker that takes the request up.
            log.exception("%s failed", job.request_id)
            text = f"worker {self._worker} failed: {type(error).__name__}: {error}"
            settlement = self._settlement(job, started_s, Reply(error=" ".join(text.split())))
        self._slot_pool.succeed()
        self._slot_pool.note_run(time.monotonic() - started_s)
        self._finish(held, settlement)

    def _finish(self, held: _Held, end: Settlement | Returning) -> None:
        """Keeps the end, or how the request goes back, for the consumer; unless it was dropped
        meanwhile and belongs to somebody else by now."""
        job = held.job
        if self._held.get(job.request_id) is held:
            held.finished = True
            if isinstance(end, Settlement):
                self._results[job.request_id] = end
            else:
                self.returns[end].append((job.request_id, job.token))
        # Not only when the task ends, so that the consumer can claim with the call that settles.
        self._vacate(held)
        self._notify()

    async def _answer(self, job: Job) -> Reply:
        try:
            request = wire.unpack_request(job.body)
        except NewerMessageError:
            raise
        except WireError as error:
            return Reply(error=f"the request cannot be read: {error}")
        if request.traceparent:
            logs.ABOUT.set({**logs.ABOUT.get(), "traceparent": request.traceparent})
        driver = self._drivers.get(job.environment)
        if driver is None:
            return Reply(error=f"worker {self._worker} does not serve {job.environment!r}")
        return await driver.run(request)

    def _settlement(self, job: Job, started_s: float, reply: Reply) -> Settlement:
        outcome = reply.verdict or ("error" if reply.error else "echo")
        count("leanq_worker_requests_total", outcome)
        # What the infrastructure says of a request may be otherwise the next time.
        lasts = reply.verdict in LEAN_VERDICTS and reply.error is None
        fingerprint = (reply.fingerprint or "") if lasts else ""
        ran_s = time.monotonic() - started_s
        if outcome != "echo" and logs.requests.isEnabledFor(logging.INFO):
            said = {"verdict": outcome, "queued_s": job.queued_s, "ran_s": round(ran_s, 4)}
            logs.requests.info("%s in %.3f s", outcome, ran_s, extra={"fields": said})
        data = wire.pack_reply(
            job.token,
            reply,
            worker=self._worker,
            attempts=job.attempts,
            queued_s=job.queued_s,
            wall_s=reply.wall_s or ran_s,
        )
        way, times = reply.way or "", times_of(job.queued_s, ran_s)
        return Settlement(
            job.request_id,
            job.token,
            outcome,
            data,
            fingerprint,
            reply.warm,
            way,
            job.environment,
            times,
        )


def _averaged(before_s: float, newest_s: float) -> float:
    return before_s + _NEWEST * (newest_s - before_s) if before_s else newest_s
