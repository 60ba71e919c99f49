"""The reaper: gives back the work of workers whose lease lapsed.

Every worker reaps when a renewal tells it that somebody is overdue; ``leanq reap`` does
the same where no worker is left. The decision is made inside the script, by the server's
clock, so any number of reapers do no harm to each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .queue import Queue
from .transitions import Reaped


async def reap(queue: Queue) -> Reaped:
    """Reaps until nothing is overdue, or there is a truce; the totals. Raises UnavailableError."""
    requeued = poisoned = 0
    while (step := await queue.reap()).more:
        requeued += step.requeued
        poisoned += step.poisoned
    return Reaped(requeued, poisoned, more=False, truce_s=step.truce_s)


async def reap_all(queues: Sequence[Queue], *, through_truce: bool) -> Reaped:
    """Reaps all shards; ``through_truce`` waits for the end of one. Raises UnavailableError."""
    parts = list(await asyncio.gather(*(reap(queue) for queue in queues)))
    if through_truce and (truce_s := max(part.truce_s for part in parts)):
        await asyncio.sleep(truce_s)
        parts += await asyncio.gather(*(reap(queue) for queue in queues))
    requeued, poisoned = sum(p.requeued for p in parts), sum(p.poisoned for p in parts)
    return Reaped(requeued, poisoned, more=False)
