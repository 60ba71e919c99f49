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

# A claim or settle call is bounded in bytes, since a script that moves megabytes holds
# everybody up.
_SETTLE_BYTES = 1 << 20
_BLOCK_S = 10.0
# Of the grace, what is kept for giving work back.
_RELEASE_S = 1.5
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
        # joined: set once its drivers can answer and the fleet knows it.
        # id: never used again, since what a dead worker held must not be taken for a living one's.
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.joined = asyncio.Event()
        self._settings = settings
        self._drivers = {driver.lane: driver for driver in drivers}
        self._slots = slots
        self._grace_s = grace_s
        self._queue = Queue(settings)
        self._held: dict[str, _Held] = {}
        self._results: list[Settlement] = []
        self._returns: list[tuple[str, str]] = []
        self._wake = asyncio.Event()
        self._claimed = asyncio.Event()
        # Whether a claim is due, and whether the listener leaves the doorbell to others.
        self._hungry = True
        self._deaf = False
        # Whether the server may think otherwise of what is held here.
        self._doubt = False
        self._stop_at_s: float | None = None
        self._failures = 0
        self._pause_until_s = 0.0
        self._fault: WorkerError | None = None

    async def run(self) -> None:
        """Works until :meth:`stop`, then drains."""
        listener = None
        try:
            for driver in self._drivers.values():
                await driver.open()
            await self._join()
            self.joined.set()
            log.info("worker %s serves %s with %d slots", self.id, self._names, self._slots)
            listener = asyncio.create_task(self._listen())
            await self._pump(listener)
        finally:
            if listener:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)
            await self._abandon()
            for driver in self._drivers.values():
                await driver.close()
            await self._queue.close()
        if self._fault:
            raise self._fault

    def stop(self, grace_s: float | None = None) -> None:
        """Drains: claims nothing more, lets requests finish within the grace (seconds), and
        gives back the rest. A second call may shorten the grace."""
        grace_s = self._grace_s if grace_s is None else grace_s
        stop_at_s = time.monotonic() + max(0.0, grace_s - _RELEASE_S)
        if self._stop_at_s is None or stop_at_s < self._stop_at_s:
            self._stop_at_s = stop_at_s
        self._wake.set()

    @property
    def _names(self) -> str:
        return ", ".join(self._drivers)

    @property
    def _free(self) -> int:
        """How many more requests could be started now."""
        if self._stop_at_s is not None or time.monotonic() < self._pause_until_s:
            return 0
        if any(held.job.alone for held in self._held.values()):
            return 0
        running = sum(held.task is not None for held in self._held.values())
        return self._slots - running

    # The pump

    async def _pump(self, listener: asyncio.Task[None]) -> None:
        renew_every_s = self._settings.lease_s / 3
        renew_at_s = time.monotonic() + renew_every_s
        pauses = backoff_s(random.Random())
        while not self._drained():
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
                    renew_at_s = time.monotonic() + renew_every_s
                    await self._renew()
                pauses = backoff_s(random.Random())
            except UnavailableError as error:
                log.warning("%s", error)
                self._doubt = True
                await asyncio.sleep(next(pauses))

    def _drained(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self._held or time.monotonic() >= self._stop_at_s

    async def _wait_until(self, renew_at_s: float) -> None:
        """Sleeps until there is something to do."""
        due = self._results or self._returns or self._doubt
        if due or (self._hungry and self._free > 0):
            # One turn of the loop, so that results of the same moment travel together.
            await asyncio.sleep(0)
            return
        until = renew_at_s
        if self._stop_at_s is not None:
            until = min(until, self._stop_at_s)
        if self._pause_until_s > time.monotonic():
            until = min(until, self._pause_until_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, until - time.monotonic()))
        self._wake.clear()

    async def _exchange(self) -> None:
        """Settles what is finished and claims for the free slots, in one call."""
        batch = self._next_settlements()
        want = max(0, self._free)
        claimed = await self._queue.claim(
            self.id,
            list(self._drivers),
            want,
            busy=len(self._held) - len(batch),
            nonce=f"{secrets.token_urlsafe(9)}:",
            settlements=batch,
        )
        for item, accepted in zip(batch, claimed.accepted, strict=True):
            self._held.pop(item.rid, None)
            if not accepted:
                log.warning("the lease of %s was lost; its result is dropped", item.rid)
        del self._results[: len(batch)]
        for job in claimed.jobs:
            self._start(job)
        self._hungry = 0 < want <= len(claimed.jobs)
        self._doubt = claimed.held != len(self._held)
        self._claimed.set()
        if self._deaf and self._free > 0 and not self._hungry:
            await self._queue.poke(self.id)

    def _next_settlements(self) -> list[Settlement]:
        batch: list[Settlement] = []
        size = 0
        for item in self._results:
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
            await asyncio.wait_for(self._claimed.wait(), 1.0)

    # Requests

    def _start(self, job: Job) -> None:
        task = asyncio.create_task(self._work(job))
        self._held[job.rid] = _Held(job, task)

    async def _work(self, job: Job) -> None:
        started = time.monotonic()
        try:
            reply = await self._answer(job)
        except WorkerError as error:
            self._fail(job, error)
            return
        self._failures = 0
        reply = dataclasses.replace(
            reply,
            worker=self.id,
            attempts=job.attempts,
            queued_s=job.queued_s,
            wall_s=reply.wall_s or time.monotonic() - started,
        )
        outcome = reply.verdict or ("error" if reply.error else "echo")
        data = wire.pack_reply(job.token, reply)
        held = self._held.get(job.rid)
        # A request that was dropped meanwhile belongs to somebody else by now.
        if held and held.job.token == job.token:
            held.task = None
            self._results.append(Settlement(job.rid, job.token, outcome, data))
            self._wake.set()

    async def _answer(self, job: Job) -> Reply:
        try:
            request = wire.unpack_request(job.body)
        except WireError as error:
            return Reply(error=f"the request cannot be read: {error}")
        driver = self._drivers.get(job.lane)
        if driver is None:
            return Reply(error=f"worker {self.id} does not serve {job.lane!r}")
        try:
            return await driver.run(request)
        except WorkerError:
            raise
        except Exception as error:
            # A fault of leanq's own would recur on every worker that takes the request up.
            log.exception("%s failed", job.rid)
            return Reply(error=f"worker {self.id} failed: {type(error).__name__}: {error}")

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
        await self._queue.release(self.id, self._returns, charge=True)
        for rid, _ in self._returns:
            self._held.pop(rid, None)
        self._returns.clear()

    def _drop(self, rid: str) -> None:
        """Stops a request whose lease is gone: withdrawn, overrun or reaped."""
        held = self._held.pop(rid, None)
        if held and held.task:
            held.task.cancel()
        self._results = [item for item in self._results if item.rid != rid]
        self._wake.set()

    async def _abandon(self) -> None:
        """Stops what still runs, gives it back, and leaves the fleet."""
        tasks = [held.task for held in self._held.values() if held.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        leases = [(held.job.rid, held.job.token) for held in self._held.values()]
        try:
            if self._results:
                await self._queue.claim(
                    self.id, [], 0, busy=0, nonce="-", settlements=self._results
                )
            given = await self._queue.release(self.id, leases, leave=True)
            log.info("worker %s left; %d requests given back", self.id, given)
        except UnavailableError as error:
            # The lease lapses, and the reaper does the same.
            log.warning("left without giving %d requests back: %s", len(leases), error)
