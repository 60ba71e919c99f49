"""The requests of one shard that a worker holds: waiting, running, finished, or to be given back.

Nothing here speaks to the queue. The consumer starts jobs, takes results and returns to send them
to the server, and drops requests whose lease the server says is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from leanq.consumer.slot_pool import SlotPool
from leanq.errors import NewerMessageError, ToolchainError, WireError, WorkerError
from leanq.fleet import logging as logs
from leanq.fleet.tracing import is_sampled, trace_id_in
from leanq.lean.driver import Driver
from leanq.queue import wire
from leanq.queue.metrics import count, note_exemplar
from leanq.queue.requests import LEAN_VERDICTS, Reply, Spent, content_of
from leanq.queue.results import Job, Returning, Settlement, Use, times_of
from leanq.queue.scripts import LARGE_BATCH_BYTES, LARGE_BYTES

log = logging.getLogger("leanq.worker")

# A script that moves megabytes delays all clients, so each call is bounded in bytes.
_SETTLE_BYTES = 1 << 20
_PAUSE_AFTER_DEFERRING_S = 0.5
_NOT_BEGUN = Spent()


class _Held(Struct, eq=False):
    """A request whose lease this worker has.

    ``end`` is its result, or how it goes back. ``campaign`` is None until it runs, and if it has no
    account.
    """

    job: Job
    end: Settlement | Returning | None = None
    campaign: str | None = None


class HeldRequests:
    """The requests of one shard; each runs as soon as a slot is free.

    A *runner* is a task that runs requests one after the other until none is left to begin. While
    requests end without waiting, one runner is enough. When one waits, each request behind it gets
    a runner of its own.

    Attributes:
        returns: (request id, token) of requests to be given back, by how.
        used: what runs have cost that no heartbeat has told yet.

    Args:
        notify: called when a request has ended.
        claimed_ahead_wait_s: how long a request may wait for a slot.
        kept_ms: the time-to-live of its replies.
    """

    def __init__(
        self,
        worker: str,
        drivers: Mapping[str, Driver],
        slot_pool: SlotPool,
        notify: Callable[[], None],
        claimed_ahead_wait_s: float,
        kept_ms: int,
    ) -> None:
        self.returns: dict[Returning, list[tuple[str, str]]]
        self.returns = {"requeue": [], "retry": [], "defer": []}
        self.used = Counter[Use]()
        self._worker = worker
        self._drivers = drivers
        self._slot_pool = slot_pool
        self._notify = notify
        self._claimed_ahead_wait_s = claimed_ahead_wait_s
        self._kept_ms = kept_ms
        self._held: dict[str, _Held] = {}
        self._results: dict[str, Settlement] = {}
        # Requests claimed ahead, and the time since which the first of them waits.
        self._waiting: deque[_Held] = deque()
        self._waiting_since_s = 0.0
        # Requests that have a slot and have not begun, and whether a task that begins them is due.
        self._ready: deque[_Held] = deque()
        self._due = False
        self._runners: set[asyncio.Task[None]] = set()
        # Requests that have begun, by their runners. A dropped one stays until its driver has
        # cleaned up.
        self._running: dict[_Held, asyncio.Task[None]] = {}

    @property
    def jobs(self) -> list[Job]:
        """Returns every request whose lease is this worker's, finished or not."""
        return [held.job for held in self._held.values()]

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def start(self, job: Job) -> None:
        """Runs a request that was claimed, or keeps it until a slot is free."""
        # It may still run here under a lease that expired before the worker noticed.
        if job.request_id in self._held:
            self.drop(job.request_id)
        held = self._held[job.request_id] = _Held(job)
        if self._slot_pool.slots.free > 0:
            self._run(held)
            return
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append(held)
        self._slot_pool.slots.waiting += 1

    @property
    def patient_until_s(self) -> float:
        """Returns the monotonic time at which to give back requests that still wait for a slot."""
        return self._waiting_since_s + self._claimed_ahead_wait_s if self._waiting else math.inf

    def return_waiting(self) -> None:
        """Gives back requests that wait for a slot, without counting an attempt.

        Other workers may be idle.
        """
        self.returns["requeue"] += ((held.job.request_id, held.job.token) for held in self._waiting)
        self._slot_pool.slots.waiting -= len(self._waiting)
        self._waiting.clear()

    @property
    def longest_run_s(self) -> float:
        """Returns for how long the request that has run the longest is held here; 0 if none runs.
        Other threads may ask."""
        now_s = time.monotonic()
        return max((now_s - held.job.answered_s for held in [*self._running]), default=0.0)

    def _run(self, held: _Held) -> None:
        self._slot_pool.slots.take(isolated=held.job.isolated)
        self._ready.append(held)
        if not self._due:
            self._add_runner()

    def _add_runner(self) -> None:
        self._due = True
        runner = asyncio.get_running_loop().create_task(self._run_ready())
        self._runners.add(runner)
        runner.add_done_callback(self._runners.discard)

    async def _run_ready(self) -> None:
        self._due = False
        runner = asyncio.current_task()
        assert runner is not None
        # A driver may swallow the cancellation of its request.
        while self._ready and not runner.cancelling():
            held = self._ready.popleft()
            if self._ready and not self._due:
                self._due = True
                asyncio.get_running_loop().call_soon(self._add_runners)
            self._running[held] = runner
            self._finish(held, await self._end_of(held))

    def _add_runners(self) -> None:
        """Adds a runner for each request that has not begun: those before them wait."""
        self._due = False
        for _ in range(len(self._ready)):
            self._add_runner()

    def drop(self, request_id: str) -> None:
        """Stops a request whose lease is gone: withdrawn, timed out or reaped."""
        held = self.forget(request_id)
        if held is None:
            return
        self._cancel(held)
        self._notify()

    def forget(self, request_id: str) -> _Held | None:
        """Forgets a request whose end the server has taken, and returns what was kept of it."""
        self._results.pop(request_id, None)
        return self._held.pop(request_id, None)

    def count(self, held: _Held, what: str, n: int = 1) -> None:
        """Counts what a run has cost; echoes cost nothing."""
        if held.campaign is not None and n:
            job = held.job
            self.used[Use(job.environment, job.tenant, held.campaign, what)] += n

    def next_settlements(self) -> list[Settlement]:
        """Returns the results to settle next: all of them, within the bytes of one call."""
        batch: list[Settlement] = []
        size = large = 0
        for item in self._results.values():
            reply_bytes = len(item.reply)
            if reply_bytes > LARGE_BYTES:
                large += reply_bytes
            else:
                size += reply_bytes
            if batch and (size > _SETTLE_BYTES or large > LARGE_BATCH_BYTES):
                break
            batch.append(item)
        return batch

    def finished_beside(self, batch: list[Settlement]) -> int:
        """Returns how many held requests are finished and not in ``batch``."""
        return sum(held.end is not None for held in self._held.values()) - len(batch)

    async def stop(self) -> None:
        """Stops all running requests, and waits until the drivers have cleaned up."""
        # Clear the waiting requests first, so that none takes a slot that becomes free.
        self._slot_pool.slots.waiting -= len(self._waiting)
        self._waiting.clear()
        for held in (*self._ready, *self._running):
            self._cancel(held)
        await asyncio.gather(*self._runners, return_exceptions=True)

    def _cancel(self, held: _Held) -> None:
        if runner := self._running.get(held):
            runner.cancel()
            runner.add_done_callback(lambda _: self._vacate(held))
        elif held in self._ready:
            self._ready.remove(held)
            self._give_slot(held)
        elif held in self._waiting:
            self._waiting.remove(held)
            self._slot_pool.slots.waiting -= 1

    def _vacate(self, held: _Held) -> None:
        if self._running.pop(held, None):
            self._give_slot(held)

    def _give_slot(self, held: _Held) -> None:
        self._slot_pool.give(isolated=held.job.isolated)
        if self._waiting and self._slot_pool.slots.free > 0:
            self._slot_pool.slots.waiting -= 1
            self._waiting_since_s = time.monotonic()
            self._run(self._waiting.popleft())

    async def _end_of(self, held: _Held) -> Settlement | Returning:
        """Runs a request, and returns its result or how it goes back."""
        job = held.job
        started_s = time.monotonic()
        logs.ABOUT.set(logs.About(job.request_id, job.attempts, self._worker, job.environment))
        try:
            reply = await self._answer(held)
            ran_s = time.monotonic() - started_s
            settlement = self._settlement(held, started_s, ran_s, reply)
        except NewerMessageError as error:
            # A newer release understands it. Without a pause this worker would claim it again.
            log.warning("%s is given back: %s", job.request_id, error)
            self._slot_pool.breaker.pause(_PAUSE_AFTER_DEFERRING_S)
            return "defer"
        except ToolchainError as error:
            # Lean itself is broken here, so the request is not to blame.
            log.error("%s is given back: %s", job.request_id, error)
            self._slot_pool.quarantine(error)
            return "requeue"
        except WorkerError as error:
            # Count the attempt: the request may be what breaks machines.
            log.error("%s: %s", type(error).__name__, error)
            self._slot_pool.breaker.failed(error)
            return "retry"
        except Exception as error:
            # A defect in leanq would recur on every worker that claims the request.
            log.exception("%s failed", job.request_id)
            text = f"worker {self._worker} failed: {type(error).__name__}: {error}"
            ran_s = time.monotonic() - started_s
            failed = Reply(error=" ".join(text.split()))
            settlement = self._settlement(held, started_s, ran_s, failed)
        # Whether or not it still counts: the time is spent.
        self.count(held, "cpu_ms", settlement.cpu_ms)
        self._slot_pool.breaker.succeeded()
        self._slot_pool.run_time.add(ran_s)
        return settlement

    def _finish(self, held: _Held, end: Settlement | Returning) -> None:
        """Keeps a request's end for the consumer, unless the request was dropped meanwhile.

        A dropped request may belong to another worker by now.
        """
        held.end = end
        if self._held.get(held.job.request_id) is held:
            job = held.job
            if isinstance(end, Settlement):
                self._results[job.request_id] = end
            else:
                self.returns[end].append((job.request_id, job.token))
        # Free the slot before the task ends, so that the call that settles can also claim.
        self._vacate(held)
        self._notify()

    async def _answer(self, held: _Held) -> Reply:
        job = held.job
        if job.body is None:
            return Reply(error="the server has lost what was asked")
        try:
            request = wire.unpack_request(job.body)
        except NewerMessageError:
            raise
        except WireError as error:
            return Reply(error=f"the request cannot be read: {error}")
        if request.op != "echo":
            held.campaign = request.campaign
            self.count(held, "attempts")
        if request.traceparent:
            about = logs.About(job.request_id, job.attempts, self._worker, job.environment)
            logs.ABOUT.set(replace(about, traceparent=request.traceparent))
        driver = self._drivers.get(job.environment)
        if driver is None:
            return Reply(error=f"worker {self._worker} does not serve {job.environment!r}")
        return await driver.run(replace(request, tenant=job.tenant))

    def _settlement(self, held: _Held, started_s: float, ran_s: float, reply: Reply) -> Settlement:
        job, outcome = held.job, reply.verdict or ("error" if reply.error else "echo")
        count("leanq_worker_requests_total", outcome)
        traceparent = about.traceparent if (about := logs.ABOUT.get()) else ""
        if is_sampled(traceparent):
            note_exemplar(("leanq_worker_requests_total", outcome), trace_id_in(traceparent), 1.0)
        else:
            traceparent = ""
        # Only Lean's own verdicts last; one of the infrastructure may differ the next time.
        lasts = reply.verdict in LEAN_VERDICTS and reply.error is None
        fingerprint = (reply.fingerprint or "") if lasts else ""
        if outcome != "echo" and logs.requests.isEnabledFor(logging.INFO):
            said = {"verdict": outcome, "queued_s": job.queued_s, "ran_s": round(ran_s, 4)}
            logs.requests.info("%s in %.3f s", outcome, ran_s, extra={"fields": said})
        signed = replace(
            reply,
            worker=self._worker,
            attempts=job.attempts,
            queued_s=job.queued_s,
            wall_s=reply.wall_s or ran_s,
            content=content_of(job.environment, job.digest),
            spent=replace(
                reply.spent or _NOT_BEGUN,
                kept_ms=self._kept_ms,
                claimed_ms=job.claimed_ms,
                held_us=round((started_s - job.answered_s) * 1e6) if job.answered_s else 0,
                lost=job.lost,
                traceparent=traceparent,
            ),
            submitted_ms=job.submitted_ms,
        )
        return Settlement(
            job.request_id,
            job.token,
            outcome,
            wire.pack_reply(job.token, signed),
            fingerprint,
            reply.warm,
            reply.way or "",
            times_of(job.queued_s, ran_s),
            reply.reason or "",
            round(reply.cpu_s * 1000),
        )
