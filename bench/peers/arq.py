"""arq: `max_jobs=50`, `queue_read_limit=100`, `poll_delay` 1 ms in worker and client (0.5 s by
default, and nothing else tells either of news), uvloop, pickle, its default. Of many outstanding
results the client polls for the four oldest only, which beats polling for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import load
import uvloop
from arq import Worker, create_pool, func
from arq.connections import RedisSettings

_POLL_S = 0.001
_POLLED = 4


async def echo(_: dict[str, Any], payload: bytes) -> bytes:
    return payload


def worker(url: str) -> None:
    async def work() -> None:
        await Worker(
            [func(echo)],
            redis_settings=RedisSettings.from_dsn(url),
            handle_signals=False,
            log_results=False,
            max_jobs=50,
            queue_read_limit=100,
            poll_delay=_POLL_S,
            keep_result=60,
        ).async_run()

    uvloop.run(work())


@asynccontextmanager
async def client(url: str) -> AsyncIterator[load.Echo]:
    pool = await create_pool(RedisSettings.from_dsn(url))
    turn = asyncio.Semaphore(_POLLED)  # first come, first served

    async def call(payload: bytes) -> bytes:
        job = await pool.enqueue_job("echo", payload)
        assert job is not None
        async with turn:
            return bytes(await job.result(poll_delay=_POLL_S))

    async def echo_all(payloads: Sequence[bytes]) -> list[bytes]:
        return [await call(payload) for payload in payloads]

    yield echo_all
    await pool.aclose()


if __name__ == "__main__":
    load.main(worker, load.Concurrent(client, run=uvloop.run))
