"""A worker that ends by itself: without requests, or without a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.fleets import Recorder
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.errors import UnavailableError
from leanq.lean.driver import EchoDriver
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings
from leanq.worker import Worker


async def test_it_ends_once_it_has_been_idle(settings: Settings, lean: AsyncLeanQClient) -> None:
    driver = Recorder()
    timings = WorkerTimings(exit_when_idle_s=0.5)
    worker = Worker(settings, [driver], slots=2, timings=timings)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(worker.run())
        await worker.joined.wait()
        asked = group.create_task(lean.echo(b"held"))
        await eventually(lambda: driver.running == [b"held"])
        # Who runs a request is not idle, however long that takes.
        began_s = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() > began_s + 1.0)
        assert not running.done()
        driver.let_go()
        assert await asked == b"held"
        await running
    assert worker.slot_pool.draining


async def test_it_ends_when_no_server_comes_back() -> None:
    server = EmbeddedServer()
    settings = replace(Settings.load(server.url, {}), lease_s=0.5)
    worker = Worker(settings, [EchoDriver()], slots=1, timings=WorkerTimings(exit_when_away_s=1.0))
    async with asyncio.timeout(60):
        running = asyncio.create_task(worker.run())
        await worker.joined.wait()
        server.close()
        with pytest.raises(UnavailableError, match="has not answered for 1 s"):
            await running


async def test_it_does_not_wait_for_ever_to_join() -> None:
    settings = Settings.load("redis://127.0.0.1:1", {})
    worker = Worker(settings, [EchoDriver()], slots=1, timings=WorkerTimings(exit_when_away_s=0.1))
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError):
            await worker.run()
