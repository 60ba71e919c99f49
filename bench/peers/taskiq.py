"""taskiq: `RedisStreamBroker`, which acknowledges, or `ListQueueBroker`, which does not; 100 tasks
at a time and 100 fetched ahead, `ORJSONSerializer`, `RedisAsyncResultBackend` (pickle, its
default) with `keep_results=False`, uvloop. `wait_result` looks every 1 ms (0.2 s by default), for
the eight oldest of many outstanding results only, which beats looking for all of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import load
import uvloop
from taskiq import AsyncBroker
from taskiq.api import run_receiver_task
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

_POLL_S = 0.001
_POLLED = 8


async def echo(payload: str) -> str:
    return payload


def _broker(url: str) -> AsyncBroker:
    kind = RedisStreamBroker if "stream" in sys.argv else ListQueueBroker
    results = RedisAsyncResultBackend[str](url, keep_results=False, result_ex_time=60)
    broker = kind(url, socket_timeout=None)
    return broker.with_result_backend(results).with_serializer(ORJSONSerializer())


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
