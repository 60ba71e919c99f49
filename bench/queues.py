"""One object with the calls of all three roles, for benchmarks that play client and worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from leanq.queue.client_queue import ClientQueue
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard
from leanq.queue.worker_queue import WorkerQueue


class Queue(Shard, ClientQueue, WorkerQueue, OperatorQueue):
    """One shard, over its own connections. It can stand for any role."""

    def __init__(self, settings: Settings, shard: int = 0) -> None:
        Shard.__init__(self, settings, shard)
        for role in (ClientQueue, WorkerQueue, OperatorQueue):
            role.__init__(self, self)


@contextlib.asynccontextmanager
async def every_shard(settings: Settings) -> AsyncIterator[list[Queue]]:
    """Yields all shards of the queue; closes them on leaving."""
    queues = Queue.each(settings)
    try:
        yield queues
    finally:
        await asyncio.gather(*(queue.close() for queue in queues))
