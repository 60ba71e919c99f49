"""The requests of one shard that a worker holds: waiting, running, finished, or to be given back.

Nothing here speaks to the queue. The consumer starts jobs, takes results and returns to send them
to the server, and drops requests whose lease the server says is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from leanq.consumer.slot_pool import SlotPool
from leanq.errors import NewerMessageError, ToolchainError, WireError, WorkerError
from leanq.fleet import logging as logs
from leanq.lean.driver import Driver
from leanq.queue import wire
from leanq.queue.metrics import count
from leanq.queue.requests import LEAN_VERDICTS, Reply
from leanq.queue.results import Job, Returning, Settlement, times_of
from leanq.queue.scripts import LARGE_BATCH_BYTES, LARGE_BYTES

log = logging.getLogger("leanq.worker")

# A call is bounded in bytes, since a script that moves megabytes delays all clients.
_SETTLE_BYTES = 1 << 20
_PAUSE_AFTER_DEFERRING_S = 0.5


@dataclass(slots=True, eq=False)
class _Held:
    """A request that this worker holds the lease of, until its end is settled; ``finished``: its
    driver has ended."""

    job: Job
    finished: bool = False


class HeldRequests:
    """The requests of one shard; runs each in a task of its own, as soon as a slot is free.

    Attributes:
        returns: (request id, token) of requests to be given back, by how.

    Args:
        worker: the worker's id, which stands in every reply.
        drivers: the driver of each environment.
        slot_pool: the slots in which they run.
        notify: called when a request has ended.
        claimed_ahead_wait_s: how long a request may wait for a slot.
    """

    def __init__(
        self,
        worker: str,
        drivers: Mapping[str, Driver],
        slot_pool: SlotPool,
        notify: Callable[[], None],
        claimed_ahead_wait_s: float,
    ) -> None:
        self.returns: dict[Returning, list[tuple[str, str]]]
        self.returns = {"requeue": [], "retry": [], "defer": []}
        self._worker = worker
        self._drivers = drivers
        self._slot_pool = slot_pool
        self._notify = notify
        self._claimed_ahead_wait_s = claimed_ahead_wait_s
        self._held: dict[str, _Held] = {}
        self._results: dict[str, Settlement] = {}
        # Requests that were claimed ahead, and since when the first of them waits.
        self._waiting: deque[_Held] = deque()
        self._waiting_since_s = 0.0
        # Requests that fill a slot: also those no longer held, while their driver cleans up.
        self._running: dict[_Held, asyncio.Task[None]] = {}

    @property
    def jobs(self) -> list[Job]:
        """Every request whose lease is this worker's, finished or not."""
        return [held.job for held in self._held.values()]

    @property
    def has_results(self) -> bool:
        """Whether something is to be settled."""
        return bool(self._results)

    def start(self, job: Job) -> None:
        """Runs a request that was claimed, or keeps it until a slot is free."""
        # It may run here already, for a lease that expired before the worker noticed.
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
        """When to give back requests that still wait for a slot; of the monotonic clock."""
        return self._waiting_since_s + self._claimed_ahead_wait_s if self._waiting else math.inf

    def return_waiting(self) -> None:
        """Gives back requests that wait for a slot, uncounted: other workers may be idle."""
        self.returns["requeue"] += ((held.job.request_id, held.job.token) for held in self._waiting)
        self._slot_pool.slots.waiting -= len(self._waiting)
        self._waiting.clear()

    def _run(self, held: _Held) -> None:
        self._slot_pool.slots.take(isolated=held.job.isolated)
        self._running[held] = asyncio.get_running_loop().create_task(self._work(held))

    def drop(self, request_id: str) -> None:
        """Stops a request whose lease is gone: withdrawn, timed out or reaped."""
        held = self.forget(request_id)
        if held is None:
            return
        self._cancel(held)
        self._notify()

    def forget(self, request_id: str) -> _Held | None:
        """The server has taken the request's end; nothing of it is kept."""
        self._results.pop(request_id, None)
        return self._held.pop(request_id, None)

    def next_settlements(self) -> list[Settlement]:
        """The results to be settled next: all of them, within the bytes of one call."""
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
        """How many held requests are finished and not in ``batch``."""
        return sum(held.finished for held in self._held.values()) - len(batch)

    async def stop(self) -> None:
        """Stops all running requests, and waits until the drivers have cleaned up."""
        tasks = list(self._running.values())
        for held in list(self._running):
            self._cancel(held)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, held: _Held) -> None:
        if held in self._waiting:
            self._waiting.remove(held)
            self._slot_pool.slots.waiting -= 1
        if task := self._running.get(held):
            task.cancel()
            # One that is cancelled before it ran could not do it itself.
            task.add_done_callback(lambda _: self._vacate(held))

    def _vacate(self, held: _Held) -> None:
        if self._running.pop(held, None):
            self._slot_pool.give(isolated=held.job.isolated)
            if self._waiting and self._slot_pool.slots.free > 0:
                self._slot_pool.slots.waiting -= 1
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
            # A newer release understands it. Without a pause this worker would claim it again.
            log.warning("%s is given back: %s", job.request_id, error)
            self._slot_pool.breaker.pause(_PAUSE_AFTER_DEFERRING_S)
            self._finish(held, "defer")
            return
        except ToolchainError as error:
            # Whatever the request was, it is not to blame.
            log.error("%s is given back: %s", job.request_id, error)
            self._slot_pool.quarantine(error)
            self._finish(held, "requeue")
            return
        except WorkerError as error:
            # The attempt counts, in case the request is what breaks machines.
            log.error("%s: %s", type(error).__name__, error)
            self._slot_pool.breaker.failed(error)
            self._finish(held, "retry")
            return
        except Exception as error:
            # A defect of leanq's would recur on every worker that claims the request.
            log.exception("%s failed", job.request_id)
            text = f"worker {self._worker} failed: {type(error).__name__}: {error}"
            settlement = self._settlement(job, started_s, Reply(error=" ".join(text.split())))
        self._slot_pool.breaker.succeeded()
        self._slot_pool.run_time.add(time.monotonic() - started_s)
        self._finish(held, settlement)

    def _finish(self, held: _Held, end: Settlement | Returning) -> None:
        """Keeps the end, or how the request goes back, for the consumer; unless it was dropped
        meanwhile and belongs to another worker by now."""
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
        if job.body is None:
            return Reply(error="the server has lost what was asked")
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
        # An outcome of the infrastructure's may differ the next time.
        lasts = reply.verdict in LEAN_VERDICTS and reply.error is None
        fingerprint = (reply.fingerprint or "") if lasts else ""
        ran_s = time.monotonic() - started_s
        if outcome != "echo" and logs.requests.isEnabledFor(logging.INFO):
            said = {"verdict": outcome, "queued_s": job.queued_s, "ran_s": round(ran_s, 4)}
            logs.requests.info("%s in %.3f s", outcome, ran_s, extra={"fields": said})
        signed = replace(
            reply,
            worker=self._worker,
            attempts=job.attempts,
            queued_s=job.queued_s,
            wall_s=reply.wall_s or ran_s,
        )
        data = wire.pack_reply(job.token, signed)
        way, times = reply.way or "", times_of(job.queued_s, ran_s)
        return Settlement(
            job.request_id,
            job.token,
            outcome,
            data,
            fingerprint,
            reply.warm,
            way,
            times,
            reply.reason or "",
            round(reply.cpu_s * 1000),
        )
