"""The worker: a fleet's unit. It has slots, drivers, and a consumer for each shard of the queue.

Its life: open the drivers, join the fleet, work, drain, leave. SIGTERM is for whoever runs it to
turn into :meth:`Worker.stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence

from leanq.consumer.consumer import Consumer
from leanq.consumer.slots import SlotPool
from leanq.errors import UnavailableError
from leanq.lean.driver import Driver
from leanq.queue.queue import Queue
from leanq.queue.settings import Settings
from leanq.states import RedisStates

log = logging.getLogger("leanq.worker")

# Of the grace, what is kept for giving work back.
_RELEASE_S = 1.5


class Worker:
    """Serves the drivers' environments with ``slots`` requests at a time until stopped.

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
        self._drivers = {driver.environment: driver for driver in drivers}
        self._grace_s = grace_s
        self._slot_pool = SlotPool(slots, self._slot_pool_changed)
        info = {
            # In Kubernetes the pod's name, by which the scaler knows whose pod is idle.
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slots": slots,
            "started": time.time(),
            "environments": list(self._drivers),
        }
        queues = Queue.each(settings)
        self._consumers = [
            Consumer(self.id, queue, self._drivers, self._slot_pool, info) for queue in queues
        ]
        self._states = RedisStates(queues)
        self._collect_every_s = settings.lease_s
        # When to give up what still runs, and the timeout that does so.
        self._stop_at_s: float | None = None
        self._limit: asyncio.Timeout | None = None

    @property
    def slots(self) -> int:
        """How many requests it runs at a time."""
        return self._slot_pool.count

    @property
    def busy(self) -> int:
        """How many run now."""
        return self._slot_pool.taken

    async def run(self) -> None:
        """Works until :meth:`stop`, then drains."""
        async with contextlib.AsyncExitStack() as at_end:
            for consumer in self._consumers:
                at_end.push_async_callback(consumer.close)
            for driver in self._drivers.values():
                at_end.push_async_callback(driver.close)
                await driver.open(self._states)
            await asyncio.gather(*(consumer.join() for consumer in self._consumers))
            at_end.push_async_callback(self._leave)
            self.joined.set()
            names = ", ".join(self._drivers)
            log.info("worker %s serves %s with %d slots", self.id, names, self._slot_pool.count)
            # The grace ends a call to a silent server as well, and any pause.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._stop_at_s) as self._limit:
                    await self._consume()
            self._limit = None
        if self._slot_pool.fault:
            raise self._slot_pool.fault

    def stop(self, grace_s: float | None = None) -> None:
        """Drains: claims nothing more, lets requests finish within the grace (seconds), and
        gives back the rest. A second call may shorten the grace."""
        grace_s = self._grace_s if grace_s is None else grace_s
        stop_at_s = time.monotonic() + max(0.0, grace_s - _RELEASE_S)
        if self._stop_at_s is None or stop_at_s < self._stop_at_s:
            self._stop_at_s = stop_at_s
            if self._limit:
                self._limit.reschedule(stop_at_s)
        self._slot_pool.closed = True
        self._wake_consumers()

    async def _consume(self) -> None:
        collector = asyncio.create_task(self._collect())
        try:
            async with asyncio.TaskGroup() as group:
                for consumer in self._consumers:
                    group.create_task(consumer.run())
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        finally:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)

    async def _collect(self) -> None:
        """Does its share of removing the states that nobody uses any more."""
        while True:
            with contextlib.suppress(UnavailableError):
                await self._states.collect()
            await asyncio.sleep(self._collect_every_s * self._consumers[0].stretch)

    async def _leave(self) -> None:
        await asyncio.gather(*(consumer.leave() for consumer in self._consumers))

    def _slot_pool_changed(self) -> None:
        if self._slot_pool.fault and not self._slot_pool.closed:
            self.stop(grace_s=0.0)
        self._wake_consumers()

    def _wake_consumers(self) -> None:
        for consumer in self._consumers:
            consumer.wake()
