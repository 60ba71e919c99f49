"""A worker's consumer of one shard: it claims, settles, renews the lease and gives back.

One task, the *consumer*, makes all calls to the shard, one at a time. So after each call it can
compare what the worker holds with what the server believes it holds. A second task, the *listener*,
blocks on the environments' wake-ups. ``leanq.consumer.claim_state`` says when a claim is due.

A call whose answer was lost may have happened. The consumer sends its settlements again, and
reconciles the requests of a lost claim from the processing list.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from leanq.consumer.claim_state import ClaimState
from leanq.consumer.held_requests import HeldRequests
from leanq.consumer.membership import Membership
from leanq.consumer.slot_pool import SlotPool
from leanq.errors import UnavailableError
from leanq.lean.driver import Driver
from leanq.queue.headers import HeadersUsed
from leanq.queue.results import Claimed, Renewed, Settlement, Stop, Times
from leanq.queue.shard import Shard, backoff_s, new_token
from leanq.queue.worker_queue import WorkerQueue, reap

log = logging.getLogger("leanq.worker")

# Up to this many idle workers renew as often as one alone would; more of them share that rate.
_WATCHERS = 50
_MAX_IDLE_FACTOR = 6.0


@dataclass(frozen=True)
class WorkerTimings:
    """How long a worker waits for what, in seconds.

    Attributes:
        block_s: one blocking call for a wake-up.
        leave_s: giving everything back to a server that may not answer.
        pause_after_failure_s: without claims, after this machine has failed at a request.
        claimed_ahead_wait_s: a request claimed ahead of a free slot, before it is given back.
        exit_when_idle_s: without a request, before the worker ends.
        exit_when_away_s: for a server that does not answer, before the worker ends.
    """

    block_s: float = 30.0
    leave_s: float = 4.0
    pause_after_failure_s: float = 2.0
    claimed_ahead_wait_s: float = 0.25
    exit_when_idle_s: float = math.inf
    exit_when_away_s: float = math.inf


class Consumer:
    """Keeps the worker's slots filled from one shard, and closes ``shard`` in the end.

    Attributes:
        idle_factor: how many times longer the worker's lease is while it holds nothing.
        away_since_s: the monotonic time since which the server has not answered, or infinity.
    """

    def __init__(
        self,
        worker: str,
        shard: Shard,
        drivers: Mapping[str, Driver],
        slot_pool: SlotPool,
        info: Mapping[str, object],
        timings: WorkerTimings,
        headers: HeadersUsed,
    ) -> None:
        self._worker = worker
        self._shard = shard
        self._queue = WorkerQueue(shard)
        self._drivers = drivers
        self._slot_pool = slot_pool
        self.membership = Membership(worker, self._queue, drivers, info)
        self._timings = timings
        self._headers = headers
        self.state = ClaimState()
        ahead_s = timings.claimed_ahead_wait_s
        self.requests = HeldRequests(
            worker, drivers, slot_pool, self._request_ended, ahead_s, shard.reply_ttl_ms
        )
        self.idle_factor = 1.0
        self.away_since_s = math.inf
        self._rng = random.Random()
        self._wake = asyncio.Event()
        self._claimed = asyncio.Event()
        self._renew_at_s = time.monotonic() + self._renew_every_s
        # Counts results since the last heartbeat by environment and times.
        self._times = Counter[tuple[str, Times]]()

    def wake(self) -> None:
        """Wakes the consumer: a slot is free, or nothing is to be claimed any more."""
        self._wake.set()

    async def run(self) -> None:
        """Works until the slot pool is draining and nothing is held."""
        listener = asyncio.create_task(self._listen())
        try:
            await self._consume(listener)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def leave(self) -> None:
        """Stops what still runs, gives it back, and leaves the fleet if it had begun to join it."""
        if not self.membership.may_be_known:
            return
        await self.requests.stop()
        try:
            async with asyncio.timeout(self._timings.leave_s):
                await self._give_all_back()
        except (UnavailableError, TimeoutError) as error:
            # The lease lapses, and the reaper gives the requests back.
            held = len(self.requests.jobs)
            log.warning("left without giving %d requests back: %r", held, error)

    async def close(self) -> None:
        await self._shard.close()

    def _request_ended(self) -> None:
        self.state.request_ended()
        self._wake.set()

    @property
    def _share(self) -> int:
        if not self.state.claim_is_due:
            return 0
        return self._slot_pool.share(self, ahead=self.state.claims_ahead)

    def _backoff(self) -> Iterator[float]:
        # After an outage every worker has to be heard before half a lease is over.
        return backoff_s(self._rng, max_s=min(5.0, self._shard.settings.lease_s / 4))

    async def _consume(self, listener: asyncio.Task[None]) -> None:
        pauses = self._backoff()
        while self.requests.jobs or not self._slot_pool.draining:
            await self._wait_until_due()
            if listener.done():
                listener.result()
            try:
                if self.state.in_doubt:
                    await self._reconcile()
                self._return_waiting()
                await self._give_back()
                if self.requests.has_results or self._share > 0:
                    await self._settle_and_claim()
                if time.monotonic() >= self._renew_at_s:
                    await self._renew()
                if self.state.should_listen_again(self._slot_pool.available):
                    self.state.listening = True
                    await self._queue.notify_worker(self._worker)
                if self.away_since_s < math.inf:
                    log.info("shard %d answers again", self._shard.keys.shard)
                pauses, self.away_since_s = self._backoff(), math.inf
            except UnavailableError as error:
                log.warning("%s", error)
                self.away_since_s = min(self.away_since_s, time.monotonic())
                # A call failed, so the worker and the server may disagree on what is held.
                self.state.disconnected()
                # The other shards must not wait for this one.
                self._slot_pool.end_turn(self)
                await asyncio.sleep(next(pauses))

    async def _wait_until_due(self) -> None:
        due = (
            self.requests.has_results or self.state.in_doubt or any(self.requests.returns.values())
        )
        if due or self._share > 0:
            # Yield to the loop once, so that results of the same moment travel together.
            await asyncio.sleep(0)
            return
        until = min(self._renew_at_s, self.requests.patient_until_s)
        if self._slot_pool.breaker.paused_until_s > time.monotonic():
            until = min(until, self._slot_pool.breaker.paused_until_s)
        await _wait(self._wake, until)
        self._wake.clear()

    async def _settle_and_claim(self) -> None:
        """Settles finished requests and claims for the free slots, in one call."""
        batch = self.requests.next_settlements()
        pool = self._slot_pool
        busy = pool.slots.taken + pool.slots.waiting + self.requests.finished_beside(batch)
        want = self._share
        if want:
            self.state.claim_sent()
        asked_s = time.monotonic()
        with pool.slots.reserve(want):
            claimed = await self._queue.claim(
                self._worker,
                list(self._drivers) if want else [],
                want,
                busy=busy,
                token=new_token(),
                settlements=batch,
            )
        pool.call_time.add(time.monotonic() - asked_s)
        self._settled(batch, claimed)
        for job in claimed.jobs:
            self.requests.start(job)
        if claimed.jobs:
            self._renew_at_s = min(self._renew_at_s, asked_s + self._renew_every_s)
        self._claimed.set()
        if want:
            pool.emptying = claimed.must_empty
            self.state.claim_answered(
                got_all=len(claimed.jobs) >= want,
                ask_again=claimed.must_empty,
                # After several requests at once more are likely, so the call that settles them
                # claims as well.
                expect_more=len(claimed.jobs) > 1,
            )
            pool.end_turn(self)
        self.state.compared(equal=claimed.held == len(self.requests.jobs))

    def _settled(self, batch: Sequence[Settlement], claimed: Claimed) -> None:
        for item, accepted in zip(batch, claimed.accepted, strict=True):
            held = self.requests.forget(item.request_id)
            if accepted and held:
                self._times[held.job.environment, item.times] += 1
                self.requests.count(held, item.outcome)
            elif not accepted:
                log.warning("the lease of %s was lost; its result is dropped", item.request_id)

    @property
    def _renew_every_s(self) -> float:
        return self._shard.settings.lease_s / 3

    async def _renew(self) -> None:
        asked_s = time.monotonic()
        renewed = await self._heartbeat(self._drivers)
        self._renew_at_s = asked_s + self._renew_every_s * (1 if renewed.held else self.idle_factor)
        self.idle_factor = min(_MAX_IDLE_FACTOR, max(1.0, renewed.workers / _WATCHERS))
        if not renewed.known:
            await self.membership.rejoin()
        else:
            await self.membership.publish_changes()
        for request_id in renewed.timed_out:
            log.warning("%s exceeded its run timeout and was taken away", request_id)
            self.requests.drop(request_id)
        if renewed.lapsed:
            reaped = await reap(self._queue)
            if reaped.requeued or reaped.poisoned:
                log.info("reaped: %d requeued, %d poisoned", reaped.requeued, reaped.poisoned)
        if renewed.held != len(self.requests.jobs):
            self.state.compared(equal=False)
        # A wake-up can be lost with its connection, and a quarantined request can end elsewhere.
        if renewed.waiting > 0:
            self.state.notified()
        self._slot_pool.emptying = False

    async def _heartbeat(self, environments: Collection[str]) -> Renewed:
        """Renews the lease, and reports how long results took, what runs cost, and which headers
        they had. The latter are counted in the first shard, and may be lost with a call."""
        times, used = self._times.copy(), self.requests.used.copy()
        headers = self._headers.take() if self._shard.keys.shard == 0 else ()
        renewed = await self._queue.renew(
            self._worker,
            environments,
            idle_factor=self.idle_factor,
            times=times,
            used=used,
            headers=headers,
        )
        self._times -= times
        self.requests.used -= used
        return renewed

    async def _reconcile(self) -> None:
        """Compares what this worker holds with its processing list, and makes them agree."""
        jobs, lost = await self._queue.reconcile(self._worker, self._held_request_ids)
        for request_id in lost:
            self.requests.drop(request_id)
        for job in jobs:
            log.info("reconciled %s: the answer to its claim was lost", job.request_id)
            self.requests.start(job)
        self.state.compared(equal=True)

    # The listener

    async def _listen(self) -> None:
        pauses = self._backoff()
        while True:
            # Wake-up tokens are for idle workers, so a busy one must not take them.
            self.state.listening = self._slot_pool.available > 0
            environments = list(self._drivers) if self.state.listening else []
            try:
                heard = await self._queue.wait_wakeup(
                    self._worker, environments, self._timings.block_s
                )
                pauses = self._backoff()
                if isinstance(heard, Stop):
                    self.requests.drop(heard.request_id)
                elif heard and self._slot_pool.available <= 0:
                    # Wake idle workers instead.
                    for environment in self._drivers:
                        await self._queue.notify(environment)
                elif heard:
                    self._claim_soon()
                    # Without this wait one worker would take every token.
                    await _wait(self._claimed, time.monotonic() + 1.0)
                    # Requests of the claim may have ended already: settle them first.
                    await asyncio.sleep(0)
            except UnavailableError:
                await asyncio.sleep(next(pauses))
                # A wake-up may have been lost with the connection.
                self._claim_soon()

    def _claim_soon(self) -> None:
        self._claimed.clear()
        self.state.notified()
        self._wake.set()

    # Giving back

    async def _give_all_back(self) -> None:
        while batch := self.requests.next_settlements():
            settles = self._queue.claim(self._worker, [], 0, busy=0, token="-", settlements=batch)
            self._settled(batch, await settles)
        if self._times or self.requests.used:
            await self._heartbeat(())
        await self._give_back()
        # A claim's answer may have come too late for the stopped requests: ask the server.
        jobs, _ = await self._queue.reconcile(self._worker, self._held_request_ids)
        leases = [(job.request_id, job.token) for job in (*self.requests.jobs, *jobs)]
        given = await self._queue.release(self._worker, leases, leave=True)
        log.info("worker %s left; %d requests given back", self._worker, given)

    def _return_waiting(self) -> None:
        """Gives back requests claimed ahead that would wait too long for a slot."""
        if time.monotonic() >= self.requests.patient_until_s:
            # They wait behind a long request, which shows in no average yet.
            self._slot_pool.run_time.add(self._timings.claimed_ahead_wait_s)
        elif not (self._slot_pool.draining or self._slot_pool.emptying):
            return
        self.requests.return_waiting()

    async def _give_back(self) -> None:
        """Gives back requests that this machine failed at or does not understand."""
        for how, returns in self.requests.returns.items():
            if batch := returns[:]:
                await self._queue.release(self._worker, batch, how=how)
                for request_id, _ in batch:
                    self.requests.forget(request_id)
                del returns[: len(batch)]

    @property
    def _held_request_ids(self) -> list[str]:
        return [job.request_id for job in self.requests.jobs]


async def _wait(event: asyncio.Event, until_s: float) -> None:
    """Waits for the event or until ``until_s``. asyncio's own timeouts cost twice as much."""
    alarm = asyncio.get_running_loop().call_at(until_s, event.set)
    try:
        await event.wait()
    finally:
        alarm.cancel()
