"""A worker: slots, drivers, and a consumer for each shard of the queue.

It opens its drivers, joins the fleet, works, drains and leaves. It waits for a server that cannot
be reached, also at the start, since servers and workers may start together. The program that runs a
worker turns SIGTERM into ``Worker.stop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import chain

from leanq.consumer.consumer import Consumer, WorkerTimings
from leanq.consumer.slot_pool import SlotPool
from leanq.errors import (
    LoginError,
    NotPermittedError,
    RefusedError,
    ToolchainError,
    UnavailableError,
    WorkerError,
)
from leanq.lean.driver import Driver
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.results import EARLY_VERSIONS, added
from leanq.queue.settings import JOB_VARIABLE, Settings
from leanq.queue.shard import (
    Shard,
    announce_shape,
    backoff_s,
    forget_refusal,
    note_for_early_clients,
    note_refusal,
)
from leanq.states import RedisStates

log = logging.getLogger("leanq.worker")

_REMEDY = (
    "it tries again until that is mended: 'leanq doctor' runs every script on this server and says "
    "which fail, and docs/operations/servers.md names the servers that serve"
)
# The part of the grace that is kept for giving work back.
_RELEASE_S = 1.5
# The bounds of the pause between two attempts to join a fleet without a server.
_REJOIN_S = 0.5, 15.0
# How often a worker says that the server refuses it.
_TELL_EVERY_S = 60.0
# How often a worker looks for requests of other releases.
_LOOK_EVERY_S = 5.0
# How often a worker tries Lean after it has ceased to work here, before the worker ends.
_TRIALS = 4


class Worker:
    """Serves the drivers' environments with ``slots`` requests at a time until stopped.

    Attributes:
        id: its name in the fleet, which no other worker ever has.
        joined: set once its drivers can answer and the fleet knows it.

    Args:
        drivers: one for each environment that it offers.
        slots: requests at a time.
        grace_s: seconds from ``stop`` to the end, unless the call names others.
        shards: its connections to the shards, in order; its own unless given.

    Raises (from ``run``):
        UsageError: living workers serve the queue with another number of shards, or lease.
        WorkerError: a driver cannot serve here, at the start or several times in a row. If Lean
            ceases to work, the worker claims nothing and tries Lean after growing pauses. It ends
            after some thirty seconds.
        UnavailableError: no shard has answered for as long as ``timings`` allow.
    """

    def __init__(
        self,
        settings: Settings,
        drivers: Sequence[Driver],
        *,
        slots: int,
        grace_s: float = 10.0,
        shards: Sequence[Shard] | None = None,
        timings: WorkerTimings | None = None,
    ) -> None:
        self._timings = timings = timings or WorkerTimings()
        # Never reuse an id: the work of a dead worker must not pass for a living one's.
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.joined = asyncio.Event()
        self.drivers: Mapping[str, Driver] = {driver.environment: driver for driver in drivers}
        self._grace_s = grace_s
        self.slot_pool = SlotPool(
            slots, self._slot_pool_changed, pause_after_failure_s=timings.pause_after_failure_s
        )
        info: dict[str, object] = {
            # In Kubernetes the pod's name, which tells the scaler which pod is idle.
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slots": slots,
            "started": time.time(),
            "environments": list(self.drivers),
        }
        # By which a scaler that starts workers as jobs knows this one. Slurm names its jobs.
        if job := os.environ.get(JOB_VARIABLE) or os.environ.get("SLURM_JOB_ID"):
            info["job"] = job
        shards = shards or Shard.each(settings)
        self._shards, self._shard = shards, shards[0]
        self._states = RedisStates(shards)
        self.consumers = [
            Consumer(
                self.id, shard, self.drivers, self.slot_pool, info, timings, self._states.headers
            )
            for shard in shards
        ]
        self._collect_every_s = settings.lease_s
        # When to give up the requests that still run, and the timeout that does so.
        self._stop_at_s: float | None = None
        self._limit: asyncio.Timeout | None = None
        self._unavailable: UnavailableError | None = None
        self._quarantined = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def longest_run_s(self) -> float:
        """Returns how long the oldest running request has been held, in seconds; 0 if none runs."""
        return max((each.requests.longest_run_s for each in self.consumers), default=0.0)

    async def run(self) -> None:
        """Works until ``stop``, then drains."""
        async with contextlib.AsyncExitStack() as at_end:
            for consumer in self.consumers:
                at_end.push_async_callback(consumer.close)
            for driver in self.drivers.values():
                at_end.push_async_callback(driver.close)
                await driver.open(self._states)
            # A worker that is stopped while it joins may be known to some shards.
            at_end.push_async_callback(self._leave)
            if not await self._join():
                return
            self.joined.set()
            names = ", ".join(self.drivers)
            log.info(
                "worker %s serves %s with %d slots", self.id, names, self.slot_pool.slots.count
            )
            describing = asyncio.create_task(self._describe())
            at_end.callback(describing.cancel)
            # The grace also ends a call to a silent server, and any pause.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._stop_at_s) as self._limit:
                    await self._consume()
            self._limit = None
        if fault := self.slot_pool.breaker.fault or self._unavailable:
            raise fault

    async def _join(self) -> bool:
        """Enters the fleet once its server can be reached; returns False if it was stopped first.

        Raises LoginError if the server refuses the password, and UnavailableError if it stays away.
        """
        give_up_at_s = time.monotonic() + self._timings.exit_when_away_s
        pauses_s = backoff_s(random.Random(), *_REJOIN_S)
        tell_at_s = -math.inf
        while True:
            try:
                await announce_shape(self._shard)
                await self._join_all()
            except LoginError:
                # Waiting does not mend it; a supervisor restarts the worker with its own backoff.
                raise
            except UnavailableError as error:
                if time.monotonic() >= give_up_at_s:
                    raise
                pause_s = next(pauses_s)
                if not isinstance(error, RefusedError | NotPermittedError):
                    log.warning("not ready: %s; trying again in %.1f s", error, pause_s)
                else:
                    await note_refusal(self._shard, self.id, str(error))
                    if time.monotonic() >= tell_at_s:
                        tell_at_s = time.monotonic() + _TELL_EVERY_S
                        log.error("worker %s cannot join: %s; %s", self.id, error, _REMEDY)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopped.wait()
                if self._stopped.is_set():
                    return False
            else:
                await forget_refusal(self._shard)
                return True

    async def _join_all(self) -> None:
        joining = (consumer.membership.join() for consumer in self.consumers)
        # Wait for all shards, or a join under way would meet the next attempt or the end.
        for end in await asyncio.gather(*joining, return_exceptions=True):
            if end is not None:
                raise end

    def stop(self, grace_s: float | None = None) -> None:
        """Drains: claims nothing more, and gives back the requests that outlast the grace.

        ``grace_s`` is in seconds. A second call may shorten the grace.
        """
        grace_s = self._grace_s if grace_s is None else grace_s
        stop_at_s = time.monotonic() + max(0.0, grace_s - _RELEASE_S)
        if self._stop_at_s is None or stop_at_s < self._stop_at_s:
            self._stop_at_s = stop_at_s
            if self._limit:
                self._limit.reschedule(stop_at_s)
        self.slot_pool.draining = True
        self._stopped.set()
        self._wake_consumers()

    async def _consume(self) -> None:
        collector = asyncio.create_task(self._collect())
        recovery = asyncio.create_task(self._recover())
        ending = asyncio.create_task(self._end_by_itself())
        watching = asyncio.create_task(self._watch_others())
        try:
            async with asyncio.TaskGroup() as group:
                for consumer in self.consumers:
                    group.create_task(consumer.run())
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        finally:
            beside = (collector, recovery, ending, watching)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _collect(self) -> None:
        """Does its share of removing unused states."""
        while True:
            with contextlib.suppress(UnavailableError):
                await self._states.collect()
            await asyncio.sleep(self._collect_every_s * self.consumers[0].idle_factor)

    async def _watch_others(self) -> None:
        """Says which requests of other releases wait here: to its log, and to early clients."""
        said: dict[tuple[int, str], float] = {}
        while True:
            with contextlib.suppress(UnavailableError):
                queues = [OperatorQueue(shard) for shard in self._shards]
                found = await asyncio.gather(*(queue.others() for queue in queues))
                rows = [row for row in added(chain.from_iterable(found)) if not row.workers]
                for row in rows:
                    if time.monotonic() >= said.get(row[:2], 0.0):
                        said[row[:2]] = time.monotonic() + _TELL_EVERY_S
                        log.warning("requests wait that this worker cannot read: %s", row.text)
                if any(row.version in EARLY_VERSIONS for row in rows):
                    await note_for_early_clients(self._shard, self.id)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _end_by_itself(self) -> None:
        """Drains after too long without a request, or without a server."""
        idle_s, away_s = self._timings.exit_when_idle_s, self._timings.exit_when_away_s
        while min(idle_s, away_s) < math.inf:
            now, slots = time.monotonic(), self.slot_pool.slots
            idle_since_s = now if slots.taken or slots.waiting else slots.idle_since_s
            away_since_s = max(consumer.away_since_s for consumer in self.consumers)
            if now >= away_since_s + away_s:
                text = f"the Redis has not answered for {away_s:g} s, so the worker ends"
                self._unavailable = UnavailableError(text)
                self.stop(grace_s=0.0)
                return
            if now >= idle_since_s + idle_s and away_since_s == math.inf:
                log.info("no request for %g s: the worker ends", idle_s)
                self.stop()
                return
            # A request may end, or the server go away, right after this look.
            await asyncio.sleep(max(0.05, min(idle_since_s + idle_s - now, away_s / 10, 60.0)))

    async def _recover(self) -> None:
        """Ends each quarantine when Lean works here again; ends the worker if it does not."""
        while True:
            await self._quarantined.wait()
            self._quarantined.clear()
            if not self.slot_pool.breaker.quarantined:
                continue
            fault = await self._fault_that_stays()
            if fault is None:
                log.warning("Lean works here again: worker %s claims requests again", self.id)
                self.slot_pool.breaker.quarantined = False
                self._wake_consumers()
            else:
                self.slot_pool.breaker.fault = fault
                self._slot_pool_changed()

    async def _fault_that_stays(self) -> WorkerError | None:
        """Returns Lean's fault if it persists over several pauses; None as soon as Lean works."""
        fault = ToolchainError("Lean does not work here")
        for doubled in range(_TRIALS):
            pause_s = self._timings.pause_after_failure_s * 2**doubled * random.uniform(0.5, 1.0)
            log.warning("worker %s claims nothing and tries Lean in %.1f s", self.id, pause_s)
            await asyncio.sleep(pause_s)
            try:
                for driver in self.drivers.values():
                    await driver.prove()
            except (WorkerError, OSError) as error:
                fault = ToolchainError(str(error))
                log.error("%s", error)
            else:
                return None
        return fault

    async def _describe(self) -> None:
        """Logs what answers in each environment; the self-tests of judges may take seconds."""
        for name, driver in self.drivers.items():
            log.info("environment %s: %s", name, await driver.describe())

    async def _leave(self) -> None:
        await asyncio.gather(*(consumer.leave() for consumer in self.consumers))

    def _slot_pool_changed(self) -> None:
        breaker = self.slot_pool.breaker
        if breaker.fault and not self.slot_pool.draining:
            self.stop(grace_s=0.0)
        if breaker.quarantined:
            self._quarantined.set()
        self._wake_consumers()

    def _wake_consumers(self) -> None:
        for consumer in self.consumers:
            consumer.wake()
