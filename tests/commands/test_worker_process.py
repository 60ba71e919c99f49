"""The process of a worker."""

from __future__ import annotations

import asyncio
import gc

from leanq.commands.worker import run_until_stopped
from leanq.lean.echo import EchoDriver
from leanq.queue.settings import Settings
from leanq.worker import Worker


class Stopped(Worker):
    """Ends at once, and says how many objects the collector passes over."""

    async def run(self) -> None:
        self.frozen = gc.get_freeze_count()


async def test_collections_pass_over_what_was_imported(settings: Settings) -> None:
    worker = Stopped(settings, [EchoDriver()], slots=1)
    try:
        async with asyncio.timeout(30.0):
            await run_until_stopped(worker)
    finally:
        gc.unfreeze()
    assert worker.frozen > 10_000
