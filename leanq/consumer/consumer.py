"""One shard of the queue, as a worker serves it: claim, settle, renew, give back.

One task, the *consumer*, makes all calls to the shard, one at a time, so that what it holds and
what the server believes it holds can be compared after every call. A second task, the *listener*,
blocks on the wake-up.

A call whose answer was lost may have happened: settlements are simply sent again, and what a lost
claim brought is reconciled from the processing list.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Iterator, Mapping

from leanq.consumer.slots import CLAIMED_AHEAD_WAIT_S, SlotPool, Slots
from leanq.errors import UnavailableError
from leanq.lean.driver import Driver
from leanq.queue import wire
from leanq.queue.queue import Queue, backoff_s
from leanq.queue.reaper import reap
from leanq.queue.results import Reserved

log = logging.getLogger("leanq.worker")

_BLOCK_S = 30.0
_LEAVE_S = 4.0
# So many idle workers look after the fleet as often as one alone would; more of them share that.
_WATCHERS = 50
_MOST_STRETCH = 6.0


class Consumer:
    """Keeps the worker's slot_pool filled from one shard. Closes ``queue`` in the end.

    Args:
        worker: the worker's id.
        drivers: the driver of each environment.
        info: what the worker says of itself.
    """

    def __init__(
        self,
        worker: str,
        queue: Queue,
        drivers: Mapping[str, Driver],
        slot_pool: SlotPool,
        info: Mapping[str, object],
    ) -> None:
        self._worker = worker
        self._queue = queue
        self._drivers = drivers
        self._slot_pool = slot_pool
        self._info = info
        self._slots = Slots(worker, drivers, slot_pool, self._something_ended)
        self._rng = random.Random()
        self._wake = asyncio.Event()
        self._claimed = asyncio.Event()
        # Whether a claim is due, whether the listener leaves the wake-up to others, and whether to
        # claim with the next results whatever the wake-up says.
        self._hungry = True
        self._deaf = False
        self._expectant = False
        # Whether the last claim left work behind.
        self._backlog = False
        # When to look at what others were reserved.
        self._look_at_s = math.inf
        # Whether the server may think otherwise of what is held here.
        self._doubt = False
        # How much longer than others' the lease of this worker is while it holds nothing.
        self.stretch = 1.0
        self._renew_at_s = time.monotonic() + self._renew_every_s
        # What the fleet was told of the environments.
        self._told: dict[str, Mapping[str, object]] = {}

    async def join(self) -> None:
        """Enters the fleet; raises UnavailableError."""
        about = self._about
        environments = {environment: wire.pack_info(said) for environment, said in about.items()}
        prints = {
            environment: str(said.get("fingerprint", "")) for environment, said in about.items()
        }
        await self._queue.register(self._worker, wire.pack_info(self._info), environments, prints)
        self._told = about

    def wake(self) -> None:
        """There is slot_pool, or nothing is to be claimed any more."""
        self._wake.set()

    async def run(self) -> None:
        """Works until the slot_pool is closed and nothing is held."""
        listener = asyncio.create_task(self._listen())
        try:
            await self._consume(listener)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def leave(self) -> None:
        """Stops what still runs, gives it back, and leaves the fleet."""
        await self._slots.stop()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._give_all_back()
        except (UnavailableError, TimeoutError) as error:
            # The lease lapses, and the reaper does the same.
            held = len(self._slots.held)
            log.warning("left without giving %d requests back: %r", held, error)

    async def close(self) -> None:
        """Closes the connections."""
        await self._queue.close()

    def _something_ended(self) -> None:
        # Whoever found nothing more, and has had an ear on the wake-up since, need not ask again.
        self._hungry = self._hungry or self._deaf or self._expectant
        self._wake.set()

    @property
    def _about(self) -> dict[str, Mapping[str, object]]:
        return {environment: driver.about for environment, driver in self._drivers.items()}

    @property
    def _share(self) -> int:
        """How many requests may be claimed now."""
        return self._slot_pool.share(self, ahead=self._backlog) if self._hungry else 0

    def _backoff(self) -> Iterator[float]:
        # After an outage everybody has to be heard before half a lease is over.
        return backoff_s(self._rng, most_s=min(5.0, self._queue.settings.lease_s / 4))

    async def _consume(self, listener: asyncio.Task[None]) -> None:
        pauses = self._backoff()
        while self._slots.held or not self._slot_pool.closed:
            await self._wait_until_due()
            if listener.done():
                listener.result()
            try:
                if self._doubt:
                    await self._reconcile()
                if time.monotonic() >= self._look_at_s:
                    await self._look()
                    self._look_at_s = math.inf
                self._return_waiting()
                await self._give_back()
                if self._slots.has_results or self._share > 0:
                    await self._exchange()
                if time.monotonic() >= self._renew_at_s:
                    await self._renew()
                if self._deaf and self._slot_pool.vacant > 0 and not self._hungry:
                    self._deaf = False
                    await self._queue.notify_worker(self._worker)
                pauses = self._backoff()
            except UnavailableError as error:
                log.warning("%s", error)
                self._doubt = self._hungry = True
                # The other shards must not wait for this one.
                self._slot_pool.end_turn(self)
                await asyncio.sleep(next(pauses))

    async def _wait_until_due(self) -> None:
        """Sleeps until there is something to do."""
        due = self._slots.has_results or self._doubt or any(self._slots.returns.values())
        if due or self._share > 0:
            # One turn of the loop, so that results of the same moment travel together.
            await asyncio.sleep(0)
            return
        until = min(self._renew_at_s, self._look_at_s, self._slots.patient_until_s)
        if self._slot_pool.paused_until_s > time.monotonic():
            until = min(until, self._slot_pool.paused_until_s)
        await _wait(self._wake, until)
        self._wake.clear()

    async def _exchange(self) -> None:
        """Settles what is finished and claims for the free slots, in one call."""
        batch = self._slots.next_settlements()
        busy = self._slot_pool.taken + self._slot_pool.waiting + self._slots.finished_beside(batch)
        want = self._share
        # The wake-up may ring while the call is under way, for what it does not see.
        self._hungry = self._hungry and not want
        asked_s = time.monotonic()
        with self._slot_pool.reserved(want):
            claimed = await self._queue.claim(
                self._worker,
                list(self._drivers) if want else [],
                want,
                busy=busy,
                token=secrets.token_urlsafe(9),
                settlements=batch,
            )
        self._slot_pool.note_call(time.monotonic() - asked_s)
        for item, accepted in zip(batch, claimed.accepted, strict=True):
            self._slots.forget(item.request_id)
            if not accepted:
                log.warning("the lease of %s was lost; its result is dropped", item.request_id)
        for job in claimed.jobs:
            self._slots.start(job)
        if claimed.jobs:
            self._renew_at_s = min(self._renew_at_s, asked_s + self._renew_every_s)
        self._claimed.set()
        if want:
            self._slot_pool.on_hold = claimed.hold
            self._backlog = len(claimed.jobs) >= want
            # A quarantined request waits until all has ended here.
            self._hungry = self._hungry or self._backlog or claimed.hold
            # Where several came at once, more is to be expected, and comes with the call that
            # settles them. Where some are reserved, each claim says how many more would be taken.
            self._expectant = len(claimed.jobs) > 1 or claimed.pinned
            self._look_at_s = time.monotonic() + claimed.again_s if claimed.again_s else math.inf
            self._slot_pool.end_turn(self)
        self._doubt = claimed.held != len(self._slots.held)

    @property
    def _renew_every_s(self) -> float:
        return self._queue.settings.lease_s / 3

    async def _renew(self) -> None:
        asked_s = time.monotonic()
        renewed = await self._queue.renew(self._worker, self._drivers, stretch=self.stretch)
        self._renew_at_s = asked_s + self._renew_every_s * (1 if renewed.held else self.stretch)
        self.stretch = min(_MOST_STRETCH, max(1.0, renewed.workers / _WATCHERS))
        # An environment can have changed, and what is remembered of it counts no more.
        if not renewed.known or self._about != self._told:
            await self.join()
        for request_id in renewed.timed_out:
            log.warning("%s ran longer than it may and was taken away", request_id)
            self._slots.drop(request_id)
        if renewed.lapsed:
            reaped = await reap(self._queue)
            if reaped.requeued or reaped.poisoned:
                log.info("reaped: %d put back, %d poisoned", reaped.requeued, reaped.poisoned)
        self._doubt = self._doubt or renewed.held != len(self._slots.held)
        # A wake-up can be lost with its connection, and a quarantined request can have
        # ended elsewhere.
        self._hungry = self._hungry or renewed.waiting > 0
        self._slot_pool.on_hold = False

    async def _reconcile(self) -> None:
        """Compares what this worker holds with its processing list, and mends it."""
        jobs, lost = await self._queue.reconcile(self._worker, self._held_request_ids)
        for request_id in lost:
            self._slots.drop(request_id)
        for job in jobs:
            log.info("reconciled %s, whose claim was answered into the void", job.request_id)
            self._slots.start(job)
        self._doubt = False

    # The listener

    async def _listen(self) -> None:
        pauses = self._backoff()
        while True:
            # A busy worker must not take tokens off the wake-up, which are for idle ones.
            self._deaf = self._slot_pool.vacant <= 0
            environments = [] if self._deaf else list(self._drivers)
            try:
                rung = await self._queue.wait_wakeup(self._worker, environments, _BLOCK_S)
                pauses = self._backoff()
                if isinstance(rung, Reserved):
                    await self._on_reservation()
                elif rung:
                    self._slots.drop(rung)
                elif rung is not None:
                    await self._on_wakeup()
            except UnavailableError:
                await asyncio.sleep(next(pauses))
                # A wake-up may have rung into the void.
                self._claim_soon()

    async def _on_wakeup(self) -> None:
        if await self._look():
            await self._until_claimed()

    async def _on_reservation(self) -> None:
        if self._slot_pool.vacant > 0:
            self._claim_soon()
            await self._until_claimed()
        else:
            # A worker that claims nothing gives up what it was reserved, at once.
            await self._queue.claim(self._worker, list(self._drivers), 0, busy=0, token="-")

    async def _look(self) -> bool:
        """Has this worker claim, or an idle one in its stead; whether it is this one."""
        if self._slot_pool.vacant <= 0:
            for environment in self._drivers:
                await self._queue.notify(environment)
            return False
        self._claim_soon()
        return True

    def _claim_soon(self) -> None:
        self._claimed.clear()
        self._hungry = True
        self._wake.set()

    async def _until_claimed(self) -> None:
        # The listener waits so long, or one worker would take every token.
        await _wait(self._claimed, time.monotonic() + 1.0)
        # What the claim brought comes first: it may have ended, and is settled before.
        await asyncio.sleep(0)

    # Giving back

    async def _give_all_back(self) -> None:
        while batch := self._slots.next_settlements():
            await self._queue.claim(self._worker, [], 0, busy=0, token="-", settlements=batch)
            for item in batch:
                self._slots.forget(item.request_id)
        await self._give_back()
        # The grace may have ended before the answer to a claim came.
        jobs, _ = await self._queue.reconcile(self._worker, self._held_request_ids)
        leases = [(job.request_id, job.token) for job in (*self._slots.held, *jobs)]
        given = await self._queue.release(self._worker, leases, leave=True)
        log.info("worker %s left; %d requests given back", self._worker, given)

    def _return_waiting(self) -> None:
        """Gives back what was claimed ahead, where it would wait too long for a slot."""
        if time.monotonic() >= self._slots.patient_until_s:
            # It waits behind something long, which shows in no average yet.
            self._slot_pool.note_run(CLAIMED_AHEAD_WAIT_S)
        elif not (self._slot_pool.closed or self._slot_pool.on_hold):
            return
        self._slots.return_waiting()

    async def _give_back(self) -> None:
        """Gives back what this machine failed at, or does not understand."""
        for how, returns in self._slots.returns.items():
            if batch := returns[:]:
                await self._queue.release(self._worker, batch, how=how)
                for request_id, _ in batch:
                    self._slots.forget(request_id)
                del returns[: len(batch)]

    @property
    def _held_request_ids(self) -> list[str]:
        return [job.request_id for job in self._slots.held]


async def _wait(event: asyncio.Event, until_s: float) -> None:
    """Waits for the event, which the clock sets at last: asyncio's timeouts cost as much again."""
    alarm = asyncio.get_running_loop().call_at(until_s, event.set)
    try:
        await event.wait()
    finally:
        alarm.cancel()
