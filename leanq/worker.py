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
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence

from . import wire
from .config import Settings
from .drivers import Driver
from .errors import UnavailableError
from .queue import Queue, backoff_s
from .reaper import reap
from .slots import Slots

log = logging.getLogger("leanq.worker")

_BLOCK_S = 10.0
# Of the grace, what is kept for giving work back.
_RELEASE_S = 1.5
_LEAVE_S = 4.0


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
        self._slot_count = slots
        self._grace_s = grace_s
        self._queue = Queue(settings)
        self._slots = Slots(self.id, self._drivers, slots, self._something_ended)
        self._wake = asyncio.Event()
        self._claimed = asyncio.Event()
        # Whether a claim is due, and whether the listener leaves the doorbell to others.
        self._hungry = True
        self._deaf = False
        # Whether the server asks this worker to empty itself, to run a suspect alone.
        self._on_hold = False
        # Whether the server may think otherwise of what is held here.
        self._doubt = False
        # When to give up what still runs, and the timeout that does so.
        self._stop_at_s: float | None = None
        self._limit: asyncio.Timeout | None = None

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
            log.info("worker %s serves %s with %d slots", self.id, names, self._slot_count)
            listener = asyncio.create_task(self._listen())
            try:
                # The grace ends a call to a silent server as well, and any pause.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._stop_at_s) as self._limit:
                        await self._pump(listener)
            finally:
                self._limit = None
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)
        if self._slots.fault:
            raise self._slots.fault

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

    def _something_ended(self) -> None:
        if self._slots.fault:
            self.stop(grace_s=0.0)
        self._hungry = True
        self._wake.set()

    @property
    def _free(self) -> int:
        """How many more requests could be started now."""
        if self._stop_at_s is not None or (self._on_hold and self._slots.running):
            return 0
        return self._slots.free

    # The pump

    async def _pump(self, listener: asyncio.Task[None]) -> None:
        renew_every_s = self._settings.lease_s / 3
        renew_at_s = time.monotonic() + renew_every_s
        pauses = backoff_s(random.Random())
        while self._stop_at_s is None or (self._slots.held and time.monotonic() < self._stop_at_s):
            await self._wait_until(renew_at_s)
            if listener.done():
                listener.result()
            try:
                if self._doubt:
                    await self._reconcile()
                await self._give_back()
                if self._slots.has_results or (self._hungry and self._free > 0):
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
        due = self._slots.has_results or self._doubt or any(self._slots.returns.values())
        if due or (self._hungry and self._free > 0):
            # One turn of the loop, so that results of the same moment travel together.
            await asyncio.sleep(0)
            return
        until = renew_at_s
        if self._slots.paused_until_s > time.monotonic():
            until = min(until, self._slots.paused_until_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        self._wake.clear()

    async def _exchange(self) -> None:
        """Settles what is finished and claims for the free slots, in one call."""
        batch = self._slots.next_settlements()
        want = max(0, self._free)
        claimed = await self._queue.claim(
            self.id,
            list(self._drivers),
            want,
            busy=self._slots.busy_beside(batch),
            nonce=f"{secrets.token_urlsafe(9)}:",
            settlements=batch,
        )
        for item, accepted in zip(batch, claimed.accepted, strict=True):
            self._slots.forget(item.rid)
            if not accepted:
                log.warning("the lease of %s was lost; its result is dropped", item.rid)
        for job in claimed.jobs:
            self._slots.start(job)
        self._on_hold = claimed.hold
        self._hungry = len(claimed.jobs) >= want
        self._doubt = claimed.held != len(self._slots.held)
        self._claimed.set()
        if self._deaf and self._free > 0 and not self._hungry:
            await self._queue.poke(self.id)

    async def _renew(self) -> None:
        renewed = await self._queue.renew(self.id)
        if not renewed.known:
            await self._join()
        for rid in renewed.overrun:
            log.warning("%s ran longer than it may and was taken away", rid)
            self._slots.drop(rid)
        if renewed.lapsed:
            reaped = await reap(self._queue)
            if reaped.requeued or reaped.poisoned:
                log.info("reaped: %d put back, %d poisoned", reaped.requeued, reaped.poisoned)
        self._doubt = self._doubt or renewed.held != len(self._slots.held)
        # A doorbell can be lost with the connection that waited for it, and a suspect can have
        # ended elsewhere.
        self._hungry, self._on_hold = True, False

    async def _reconcile(self) -> None:
        """Compares what this worker holds with its processing list, and mends it."""
        jobs, lost = await self._queue.adopt(self.id, self._held_rids)
        for rid in lost:
            self._slots.drop(rid)
        for job in jobs:
            log.info("adopted %s, whose claim was answered into the void", job.rid)
            self._slots.start(job)
        self._doubt = False

    async def _join(self) -> None:
        info = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slots": self._slot_count,
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
                    self._slots.drop(rung)
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

    # The end

    async def _leave(self) -> None:
        """Stops what still runs, gives it back, and leaves the fleet."""
        await self._slots.stop()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._give_all_back()
        except (UnavailableError, TimeoutError) as error:
            # The lease lapses, and the reaper does the same.
            held = len(self._slots.held)
            log.warning("left without giving %d requests back: %r", held, error)

    async def _give_all_back(self) -> None:
        while batch := self._slots.next_settlements():
            await self._queue.claim(self.id, [], 0, busy=0, nonce="-", settlements=batch)
            for item in batch:
                self._slots.forget(item.rid)
        await self._give_back()
        # The grace may have ended before the answer to a claim came.
        jobs, _ = await self._queue.adopt(self.id, self._held_rids)
        leases = [(job.rid, job.token) for job in (*self._slots.held, *jobs)]
        given = await self._queue.release(self.id, leases, leave=True)
        log.info("worker %s left; %d requests given back", self.id, given)

    async def _give_back(self) -> None:
        """Gives back what this machine failed at, or does not understand."""
        for how, returns in self._slots.returns.items():
            if batch := returns[:]:
                await self._queue.release(self.id, batch, how=how)
                for rid, _ in batch:
                    self._slots.forget(rid)
                del returns[: len(batch)]

    @property
    def _held_rids(self) -> list[str]:
        return [job.rid for job in self._slots.held]
