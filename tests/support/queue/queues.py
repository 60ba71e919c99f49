"""One object with the calls of all three roles, for tests that play client, worker and operator."""

from __future__ import annotations

from leanq.queue.client_queue import ClientQueue
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard
from leanq.queue.worker_queue import WorkerQueue


class Queue(Shard, ClientQueue, WorkerQueue, OperatorQueue):
    """One shard, over its own connections. It stands for any role wherever one is expected."""

    def __init__(self, settings: Settings, shard: int = 0) -> None:
        Shard.__init__(self, settings, shard)
        for role in (ClientQueue, WorkerQueue, OperatorQueue):
            role.__init__(self, self)
