"""The worker: claim, run, settle; one lease over all that it holds; drain.

One task, the *pump*, makes all calls to the queue, one at a time, so that what it holds
and what the server believes it holds can be compared after every call. A second task, the
*listener*, blocks on the doorbell. Each claimed request runs in a task of its own.

A call whose answer was lost may have happened: settlements are simply sent again, and
what a lost claim brought is adopted from the processing list.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from . import wire
from .config import Settings
from .drivers import Driver
from .errors import UnavailableError, WireError, WorkerError
from .queue import Queue, backoff_s
from .reaper import reap
from .transitions import Job, Settlement
from .wire import Reply

log = logging.getLogger("leanq.worker")

# A call is bounded in bytes, since a script that moves megabytes holds everybody up.
_SETTLE_BYTES = 1 << 20
_BLOCK_S = 10.0
# Of the grace, what is kept for giving work back.
_RELEASE_S = 1.5
_LEAVE_S = 4.0
# Before Python 3.12, wait_for can swallow a cancellation, and redis-py sends with it.
_CANCEL_AGAIN_S = 0.05
_FAILURES_IN_A_ROW = 3
_PAUSE_AFTER_FAILURE_S = 2.0


@dataclass(slots=True)
class _Held:
    """A request that this worker holds the lease of; ``task`` is None once it is finished."""

    job: Job
    task: asyncio.Task[None] | None


class Worker:
    """Serves the drivers' lanes with ``slots`` requests at a time until stopped.

    Raises (from :meth:`run`):
        UnavailableError: the server cannot be reached at the start.
        WorkerError: a driver cannot serve here, at the start or several times in a row.
    """

    def __init__(
        self, settings: Settings, drivers: Sequence[Driver], *, slots: int, grace_s: float = 10.0
    ) -> None:
        # Never used again, since what a dead worker held must not be taken for a living one's.
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        # Set once its drivers can answer and the fleet knows it.
        self.joined = asyncio.Event()
        self._settings = settings
        self._drivers = {driver.lane: driver for driver in drivers}
        self._slots = slots
        self._grace_s = grace_s
        self._queue = Queue(settings)
        self._held: dict[str, _Held] = {}
        # Of what is held: what is finished by rid, and what goes back as (rid, token).
        self._results: dict[str, Settlement] = {}
        self._returns: list[tuple[str, str]] = []
        # No longer held, but their drivers have still to clean up; they fill a slot so long.
        self._stopping: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._claimed = asyncio.Event()
        # Whether a claim is due, and whether the listener leaves the doorbell to others.
        self._hungry = True
        self._deaf = False
        # Whether the server may think otherwise of what is held here.
        self._doubt = False
        # When to give up what still runs, and the timeout that does so.
        self._stop_at_s: float | None = None
        self._limit: asyncio.Timeout | None = None
        self._failures = 0
        self._pause_until_s = 0.0
        self._fault: WorkerError | None = None

    async def run(self) -> None:
        """Works until :meth:`stop`, then drains."""
        async with contextlib.AsyncExitStack() as at_end:
            at_end.push_async_callback(self._queue.close)
            for driver in self._drivers.values():
                at_end.push_async_callback(driver.close)
                await driver.open()
            await self._join()
            at_end.push_async_callback(self._leave)
            self.joined.set()
            names = ", ".join(self._drivers)
            log.info("worker %s serves %s with %d slots", self.id, names, self._slots)
            listener = asyncio.create_task(self._listen())
            try:
                # The grace ends a call to a silent server as well, and any pause.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._stop_at_s) as self._limit:
                        await self._pump(listener)
            finally:
                self._limit = None
                while not listener.done():
                    listener.cancel()
                    await asyncio.wait([listener], timeout=_CANCEL_AGAIN_S)
        if self._fault:
            raise self._fault

    def stop(self, grace_s: float | None = None) -> None:
        """Drains: claims nothing more, lets requests finish within the grace (seconds), and
        gives back the rest. A second call may shorten the grace."""
        grace_s = self._grace_s if grace_s is None else grace_s
        stop_at_s = time.monotonic() + max(0.0, grace_s - _RELEASE_S)
        if self._stop_at_s is None or stop_at_s < self._stop_at_s:
            self._stop_at_s = stop_at_s
            if self._limit:
                self._limit.reschedule(stop_at_s)
        self._wake.set()

    @property
    def _free(self) -> int:
        """How many more requests could be started now."""
        if self._stop_at_s is not None or time.monotonic() < self._pause_until_s:
            return 0
        running = [held for held in self._held.values() if held.task]
        if any(held.job.alone for held in running):
            return 0
        return self._slots - len(running) - len(self._stopping)

    # The pump

    async def _pump(self, listener: asyncio.Task[None]) -> None:
        renew_every_s = self._settings.lease_s / 3
        renew_at_s = time.monotonic() + renew_every_s
        pauses = backoff_s(random.Random())
        while self._stop_at_s is None or (self._held and time.monotonic() < self._stop_at_s):
            await self._wait_until(renew_at_s)
            if listener.done():
                listener.result()
            try:
                if self._doubt:
                    await self._reconcile()
                if self._returns:
                    await self._give_back()
                if self._results or (self._hungry and self._free > 0):
                    await self._exchange()
                if time.monotonic() >= renew_at_s:
                    next_s = time.monotonic() + renew_every_s
                    await self._renew()
                    renew_at_s = next_s
                pauses = backoff_s(random.Random())
            except UnavailableError as error:
                log.warning("%s", error)
                self._doubt = True
                await asyncio.sleep(next(pauses))

    async def _wait_until(self, renew_at_s: float) -> None:
        """Sleeps until there is something to do."""
        due = self._results or self._returns or self._doubt
        if due or (self._hungry and self._free > 0):
            # One turn of the loop, so that results of the same moment travel together.
            await asyncio.sleep(0)
            return
        until = renew_at_s
        if self._pause_until_s > time.monotonic():
            until = min(until, self._pause_until_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        self._wake.clear()

    async def _exchange(self) -> None:
        """Settles what is finished and claims for the free slots, in one call."""
        batch = self._next_settlements()
        want = max(0, self._free)
        claimed = await self._queue.claim(
            self.id,
            list(self._drivers),
            want,
            busy=len(self._held) - len(batch) + len(self._stopping),
            nonce=f"{secrets.token_urlsafe(9)}:",
            settlements=batch,
        )
        for item, accepted in zip(batch, claimed.accepted, strict=True):
            self._held.pop(item.rid, None)
            self._results.pop(item.rid, None)
            if not accepted:
                log.warning("the lease of %s was lost; its result is dropped", item.rid)
        for job in claimed.jobs:
            self._start(job)
        self._hungry = len(claimed.jobs) >= want
        self._doubt = claimed.held != len(self._held)
        self._claimed.set()
        if self._deaf and self._free > 0 and not self._hungry:
            await self._queue.poke(self.id)

    def _next_settlements(self) -> list[Settlement]:
        batch: list[Settlement] = []
        size = 0
        for item in self._results.values():
            if batch and size + len(item.reply) > _SETTLE_BYTES:
                break
            batch.append(item)
            size += len(item.reply)
        return batch

    async def _renew(self) -> None:
        renewed = await self._queue.renew(self.id)
        if not renewed.known:
            await self._join()
        for rid in renewed.overrun:
            log.warning("%s ran longer than it may and was taken away", rid)
            self._drop(rid)
        if renewed.lapsed:
            reaped = await reap(self._queue)
            if reaped.requeued or reaped.poisoned:
                log.info("reaped: %d put back, %d poisoned", reaped.requeued, reaped.poisoned)
        self._doubt = self._doubt or renewed.held != len(self._held)
        # A doorbell can be lost with the connection that waited for it.
        self._hungry = True

    async def _reconcile(self) -> None:
        """Compares what this worker holds with its processing list, and mends it."""
        jobs, lost = await self._queue.adopt(self.id, list(self._held))
        for rid in lost:
            self._drop(rid)
        for job in jobs:
            log.info("adopted %s, whose claim was answered into the void", job.rid)
            self._start(job)
        self._doubt = False

    async def _join(self) -> None:
        info = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slots": self._slots,
            "started": time.time(),
            "lanes": list(self._drivers),
        }
        lanes = {lane: wire.pack_info(d.about) for lane, d in self._drivers.items()}
        await self._queue.join(self.id, wire.pack_info(info), lanes)

    # The listener

    async def _listen(self) -> None:
        pauses = backoff_s(random.Random())
        while True:
            # A busy worker must not take tokens off the doorbell, which are for idle ones.
            self._deaf = self._free <= 0
            lanes = [] if self._deaf else list(self._drivers)
            try:
                rung = await self._queue.wait_bell(self.id, lanes, _BLOCK_S)
                pauses = backoff_s(random.Random())
                if rung:
                    self._drop(rung)
                elif rung is not None:
                    await self._answer_bell(lanes)
            except UnavailableError:
                await asyncio.sleep(next(pauses))

    async def _answer_bell(self, lanes: Sequence[str]) -> None:
        if self._free <= 0:
            for lane in lanes:
                await self._queue.ring(lane)
            return
        self._claimed.clear()
        self._hungry = True
        self._wake.set()
        # Not again before the claim, or one worker would take every token.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._claimed.wait()

    # Requests

    def _start(self, job: Job) -> None:
        # It may run here already, for a lease that lapsed before anybody noticed.
        self._drop(job.rid)
        self._held[job.rid] = _Held(job, asyncio.create_task(self._work(job)))

    async def _work(self, job: Job) -> None:
        started = time.monotonic()
        try:
            settlement = self._settlement(job, started, await self._answer(job))
        except WorkerError as error:
            self._fail(job, error)
            return
        except Exception as error:
            # A fault of leanq's own would recur on every worker that takes the request up.
            log.exception("%s failed", job.rid)
            text = f"worker {self.id} failed: {type(error).__name__}: {error}"
            settlement = self._settlement(job, started, Reply(error=" ".join(text.split())))
        self._failures = 0
        held = self._held.get(job.rid)
        # A request that was dropped meanwhile belongs to somebody else by now.
        if held and held.job.token == job.token:
            held.task = None
            self._results[job.rid] = settlement
            self._wake.set()

    def _settlement(self, job: Job, started_s: float, reply: Reply) -> Settlement:
        reply = dataclasses.replace(
            reply,
            worker=self.id,
            attempts=job.attempts,
            queued_s=job.queued_s,
            wall_s=reply.wall_s or time.monotonic() - started_s,
        )
        outcome = reply.verdict or ("error" if reply.error else "echo")
        return Settlement(job.rid, job.token, outcome, wire.pack_reply(job.token, reply))

    async def _answer(self, job: Job) -> Reply:
        try:
            request = wire.unpack_request(job.body)
        except WireError as error:
            return Reply(error=f"the request cannot be read: {error}")
        driver = self._drivers.get(job.lane)
        if driver is None:
            return Reply(error=f"worker {self.id} does not serve {job.lane!r}")
        return await driver.run(request)

    def _fail(self, job: Job, error: WorkerError) -> None:
        """This machine failed. The request goes back, one attempt older, in case it is what
        breaks machines; after several failures in a row the worker ends rather than churn."""
        log.error("%s: %s", type(error).__name__, error)
        self._failures += 1
        self._pause_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
        held = self._held.get(job.rid)
        if held and held.job.token == job.token:
            held.task = None
            self._returns.append((job.rid, job.token))
        self._hungry = True
        if self._failures >= _FAILURES_IN_A_ROW:
            self._fault = error
            self.stop(grace_s=0.0)
        self._wake.set()

    async def _give_back(self) -> None:
        batch = list(self._returns)
        await self._queue.release(self.id, batch, charge=True)
        for rid, _ in batch:
            self._held.pop(rid, None)
        del self._returns[: len(batch)]

    def _drop(self, rid: str) -> None:
        """Stops a request whose lease is gone: withdrawn, overrun or reaped."""
        held = self._held.pop(rid, None)
        if held is None:
            return
        self._results.pop(rid, None)
        if held.task:
            held.task.cancel()
            self._stopping.add(held.task)
            held.task.add_done_callback(self._stopped)
        self._wake.set()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        self._hungry = True
        self._wake.set()

    async def _leave(self) -> None:
        """Stops what still runs, gives it back, and leaves the fleet."""
        tasks = [*self._stopping, *(held.task for held in self._held.values() if held.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._give_all_back()
        except (UnavailableError, TimeoutError) as error:
            # The lease lapses, and the reaper does the same.
            log.warning("left without giving %d requests back: %r", len(self._held), error)

    async def _give_all_back(self) -> None:
        results = list(self._results.values())
        if results:
            await self._queue.claim(self.id, [], 0, busy=0, nonce="-", settlements=results)
        if self._returns:
            await self._give_back()
        # The grace may have ended before the answer to a claim came.
        jobs, _ = await self._queue.adopt(self.id, list(self._held))
        leases = [(j.rid, j.token) for j in (*(h.job for h in self._held.values()), *jobs)]
        given = await self._queue.release(self.id, leases, leave=True)
        log.info("worker %s left; %d requests given back", self.id, given)
