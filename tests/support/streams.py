"""Requests without end, while something befalls the server."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator

from leanq.client import AsyncLeanQClient
from leanq.queue.operator_queue import look
from leanq.queue.settings import Settings
from support.fleets import working
from support.waiting import eventually


class Stream:
    """Requests without end; each must be answered with its own payload."""

    def __init__(self, lean: AsyncLeanQClient, size_bytes: int) -> None:
        self.lean = lean
        self.size_bytes = size_bytes
        self.answered: Counter[int] = Counter()

    async def run(self, shard: int) -> None:
        while True:
            payload = secrets.token_bytes(self.size_bytes)
            request_id = f"{shard}-{payload[:8].hex()}"
            assert await self.lean.echo(payload, delay_s=0.002, request_id=request_id) == payload
            self.answered[shard] += 1

    async def goes_on(self, shard: int = 0, more: int = 20) -> None:
        """Waits until so many more requests of the shard are answered."""
        goal = self.answered[shard] + more
        await eventually(lambda: self.answered[shard] >= goal, deadline_s=45.0)


@contextlib.asynccontextmanager
async def stream(settings: Settings, *, size_bytes: int = 8) -> AsyncIterator[Stream]:
    """Requests and two workers for them. Each is answered with its own payload."""
    async with working(settings, slots=8), working(settings, slots=8):
        async with AsyncLeanQClient(settings) as lean:
            made = Stream(lean, size_bytes)
            shards = settings.shards
            tasks = [asyncio.create_task(made.run(number % shards)) for number in range(12)]
            try:
                yield made
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * len(tasks)
    status = await look(settings)
    assert status.counters.get("verdict:poisoned", 0) == 0
    assert not status.priorities
