"""taskiq"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import load
import uvloop
from taskiq import AsyncBroker
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

_POLL_S = float(os.environ.get("P", "0.001"))
_POLLED = int(os.environ.get("S", "4"))


async def echo(payload: str) -> str:
    return payload


def _broker(url: str) -> AsyncBroker:
    kind = RedisStreamBroker if "stream" in sys.argv else ListQueueBroker
    results = RedisAsyncResultBackend[str](url, keep_results=False, result_ex_time=60)
    return kind(url, socket_timeout=None).with_result_backend(results)


def worker(url: str) -> None:
    async def work() -> None:
        broker = _broker(url)
        broker.register_task(echo, task_name="echo")
        await broker.startup()
        await run_receiver_task(
            broker, max_async_tasks=100, max_prefetch=100, validate_params=False
        )

    uvloop.run(work())


@asynccontextmanager
async def client(url: str) -> AsyncIterator[load.Echo]:
    broker = _broker(url)
    task = broker.register_task(echo, task_name="echo")
    await broker.startup()
    turn = asyncio.Semaphore(_POLLED)  # first come, first served

    async def call(payload: bytes) -> bytes:
        sent = await task.kiq(payload.decode())
        async with turn:
            result = await sent.wait_result(check_interval=_POLL_S)
        return result.return_value.encode()

    async def echo_all(payloads: Sequence[bytes]) -> list[bytes]:
        return [await call(payload) for payload in payloads]

    yield echo_all
    await broker.shutdown()


if __name__ == "__main__":
    load.main(worker, load.Concurrent(client, run=uvloop.run))
