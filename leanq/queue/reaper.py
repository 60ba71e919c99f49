"""The reaper: requeues the requests of workers whose lease has expired.

Every worker reaps when a renewal tells it that a lease has expired. ``leanq reap`` does the same if
no worker is left. The script decides by the server's clock, so any number of reapers do no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from leanq.queue.results import Reaped
from leanq.queue.worker_queue import WorkerQueue

_TICK_S = 0.01


async def reap(queue: WorkerQueue) -> Reaped:
    """Reaps until no lease is overdue or an expiry grace period begins; returns the totals.

    Raises UnavailableError.
    """
    requeued = poisoned = 0
    while (step := await queue.reap()).more:
        requeued += step.requeued
        poisoned += step.poisoned
    return Reaped(requeued, poisoned, more=False, expiry_grace_s=step.expiry_grace_s)


async def reap_all(queues: Sequence[WorkerQueue], *, through_expiry_grace: bool) -> Reaped:
    """Reaps all shards; ``through_expiry_grace`` also waits for grace periods to end.

    Raises UnavailableError.
    """
    requeued = poisoned = 0
    while True:
        parts = await asyncio.gather(*(reap(queue) for queue in queues))
        requeued += sum(part.requeued for part in parts)
        poisoned += sum(part.poisoned for part in parts)
        expiry_grace_s = max(part.expiry_grace_s for part in parts)
        if not (expiry_grace_s and through_expiry_grace):
            return Reaped(requeued, poisoned, more=False)
        # Wait half of it: if no other process is heard, a silence as long as all of it would begin
        # another grace period.
        await asyncio.sleep(expiry_grace_s / 2 + _TICK_S)
