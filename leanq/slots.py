"""What one worker holds: the requests that run, what is finished, and what goes back.

Nothing here speaks to the queue. The worker's pump starts jobs, takes results and returns away
to tell the server, and drops what the server says is no longer its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import wire
from .drivers import Driver
from .errors import NewerMessageError, WireError, WorkerError
from .transitions import Job, Returning, Settlement
from .wire import Reply

log = logging.getLogger("leanq.worker")

# A call is bounded in bytes, since a script that moves megabytes holds everybody up.
_SETTLE_BYTES = 1 << 20
_FAILURES_IN_A_ROW = 3
_PAUSE_AFTER_FAILURE_S = 2.0
_PAUSE_AFTER_DEFERRING_S = 0.5


@dataclass(slots=True)
class _Held:
    """A request that this worker holds the lease of; ``task`` is None once it is finished."""

    job: Job
    task: asyncio.Task[None] | None


class Slots:
    """Runs each request in a task of its own, ``count`` at a time.

    Attributes:
        returns: (rid, token) of requests that go back, by how they do.
        fault: set after several failures in a row, when the worker should end rather than churn.

    Args:
        worker: the worker's id, which stands in every reply.
        drivers: the driver of each lane.
        notify: called when something ended.
    """

    def __init__(
        self, worker: str, drivers: Mapping[str, Driver], count: int, notify: Callable[[], None]
    ) -> None:
        self.returns: dict[Returning, list[tuple[str, str]]] = {"charge": [], "defer": []}
        self.fault: WorkerError | None = None
        self._worker = worker
        self._drivers = drivers
        self._count = count
        self._notify = notify
        self._held: dict[str, _Held] = {}
        self._results: dict[str, Settlement] = {}
        # No longer held, but their drivers have still to clean up; they fill a slot so long.
        self._stopping: set[asyncio.Task[None]] = set()
        self._failures = 0
        self.paused_until_s = 0.0

    @property
    def held(self) -> list[Job]:
        """Every request whose lease is this worker's, finished or not."""
        return [held.job for held in self._held.values()]

    @property
    def has_results(self) -> bool:
        """Whether something is to be settled."""
        return bool(self._results)

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return len(self._stopping) + sum(held.task is not None for held in self._held.values())

    @property
    def free(self) -> int:
        """How many more requests could be started now."""
        if time.monotonic() < self.paused_until_s:
            return 0
        if any(held.job.alone and held.task for held in self._held.values()):
            return 0
        return self._count - self.running

    def busy_beside(self, batch: list[Settlement]) -> int:
        """How many requests are in flight once ``batch`` is settled."""
        return len(self._held) - len(batch) + len(self._stopping)

    def start(self, job: Job) -> None:
        # It may run here already, for a lease that lapsed before anybody noticed.
        self.drop(job.rid)
        self._held[job.rid] = _Held(job, asyncio.create_task(self._work(job)))

    def drop(self, rid: str) -> None:
        """Stops a request whose lease is gone: withdrawn, overrun or reaped."""
        held = self.forget(rid)
        if held is None:
            return
        if held.task:
            held.task.cancel()
            self._stopping.add(held.task)
            held.task.add_done_callback(self._stopped)
        self._notify()

    def forget(self, rid: str) -> _Held | None:
        """The server has taken its end; nothing of it is kept."""
        self._results.pop(rid, None)
        return self._held.pop(rid, None)

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

    async def stop(self) -> None:
        """Stops all that runs, and waits until the drivers have cleaned up."""
        tasks = [*self._stopping, *(held.task for held in self._held.values() if held.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        self._notify()

    async def _work(self, job: Job) -> None:
        started_s = time.monotonic()
        try:
            settlement = self._settlement(job, started_s, await self._answer(job))
        except NewerMessageError as error:
            self._defer(job, error)
            return
        except WorkerError as error:
            self._fail(job, error)
            return
        except Exception as error:
            # A fault of leanq's own would recur on every worker that takes the request up.
            log.exception("%s failed", job.rid)
            text = f"worker {self._worker} failed: {type(error).__name__}: {error}"
            settlement = self._settlement(job, started_s, Reply(error=" ".join(text.split())))
        self._failures = 0
        if held := self._still_held(job):
            held.task = None
            self._results[job.rid] = settlement
            self._notify()

    async def _answer(self, job: Job) -> Reply:
        try:
            request = wire.unpack_request(job.body)
        except NewerMessageError:
            raise
        except WireError as error:
            return Reply(error=f"the request cannot be read: {error}")
        driver = self._drivers.get(job.lane)
        if driver is None:
            return Reply(error=f"worker {self._worker} does not serve {job.lane!r}")
        return await driver.run(request)

    def _settlement(self, job: Job, started_s: float, reply: Reply) -> Settlement:
        reply = dataclasses.replace(
            reply,
            worker=self._worker,
            attempts=job.attempts,
            queued_s=job.queued_s,
            wall_s=reply.wall_s or time.monotonic() - started_s,
        )
        outcome = reply.verdict or ("error" if reply.error else "echo")
        return Settlement(job.rid, job.token, outcome, wire.pack_reply(job.token, reply))

    def _fail(self, job: Job, error: WorkerError) -> None:
        """This machine failed. The request goes back, one attempt older, in case it is what
        breaks machines."""
        log.error("%s: %s", type(error).__name__, error)
        self._failures += 1
        self.paused_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
        if held := self._still_held(job):
            held.task = None
            self.returns["charge"].append((job.rid, job.token))
        if self._failures >= _FAILURES_IN_A_ROW:
            self.fault = error
        self._notify()

    def _defer(self, job: Job, error: NewerMessageError) -> None:
        """A newer release understands it. This worker pauses, or it would only claim it again."""
        log.warning("%s is given back: %s", job.rid, error)
        self.paused_until_s = time.monotonic() + _PAUSE_AFTER_DEFERRING_S
        if held := self._still_held(job):
            held.task = None
            self.returns["defer"].append((job.rid, job.token))
        self._notify()

    def _still_held(self, job: Job) -> _Held | None:
        """None for one that was dropped meanwhile, and belongs to somebody else by now."""
        held = self._held.get(job.rid)
        return held if held and held.job.token == job.token else None
