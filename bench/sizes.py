"""Measures memory per queued request and per outstanding future, and the cost of an idle fleet."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fleet import PAYLOAD_BYTES, Fleet, Load, look
from queues import Queue
from servers import server

from leanq.client import LeanQClient
from leanq.lean.driver import EchoDriver
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.requests import Request
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_request
from leanq.worker import Worker

_QUEUED, _FUTURES = 40_000, 20_000
_BODY_BYTES = 1024
_IDLE_S, _SETTLE_S = 20.0, 5.0


class Idle(NamedTuple):
    """The server's share of a core with a waiting fleet, and without; bytes per worker."""

    share: float
    alone: float
    worker_bytes: float


async def queued_bytes() -> float:
    """Returns the bytes in Redis of a waiting check with a packed body of 1 KB."""
    with server() as url:
        settings = Settings(url)
        queue, calls = Queue(settings), RequestBuilder(settings, "default")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(queue.close)
            await Fleet(queue, Load(checks=True)).open()
            spare = _BODY_BYTES - len(pack_request(Request("check", code="-" * _BODY_BYTES)))
            batch = [
                calls.check(f"-- {n:06} ".ljust(_BODY_BYTES + spare, "-"), {}).submission
                for n in range(_QUEUED)
            ]
            assert len(batch[0].body) == _BODY_BYTES
            before = await look(queue)
            for start in range(0, _QUEUED, 1000):
                await queue.submit("client-1", batch[start : start + 1000])
            after = await look(queue)
    return (after.memory_bytes - before.memory_bytes) / _QUEUED


def future_bytes() -> float:
    """Returns the bytes of a waiting future in the client's process, beside its payload."""
    with server() as url:
        asyncio.run(_know_echo(url))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(_resident_per_future, url).result()


async def _know_echo(url: str) -> None:
    """Runs a worker once, so that the queue accepts echoes."""
    worker = Worker(Settings(url), [EchoDriver()], slots=1)
    running = asyncio.create_task(worker.run())
    await worker.joined.wait()
    worker.stop()
    await running


def _resident_per_future(url: str) -> float:
    with LeanQClient(url) as client:
        # Leave out what only the first future needs.
        futures = [client.echo(b"%0*d" % (PAYLOAD_BYTES, 0))]
        time.sleep(1)
        before = _resident_bytes()
        futures += (client.echo(b"%0*d" % (PAYLOAD_BYTES, n)) for n in range(1, _FUTURES))
        # Wait until all are submitted and their batches are freed.
        time.sleep(3)
        used = _resident_bytes() - before
    return used / (len(futures) - 1) - PAYLOAD_BYTES


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def idle(count: int = 1000) -> Idle:
    """Runs so many real workers in this process, each with its two connections."""
    with server() as url:
        queue = Queue(Settings(url))
        alone = await _share(queue)
        before = await look(queue)
        workers = [Worker(Settings(url), [EchoDriver()], slots=8) for _ in range(count)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await worker.joined.wait()
        await asyncio.sleep(_SETTLE_S)
        share = await _share(queue)
        after = await look(queue)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
        await queue.close()
    return Idle(share, alone, (after.memory_bytes - before.memory_bytes) / count)


async def _share(queue: Queue) -> float:
    before, started_s = await look(queue), time.monotonic()
    await asyncio.sleep(_IDLE_S)
    after = await look(queue)
    return (after.cpu_s - before.cpu_s) / (time.monotonic() - started_s)
