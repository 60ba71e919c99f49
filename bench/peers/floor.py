"""redis-py ping-pong: asyncio, LPUSH and BLPOP there, LPUSH and BLPOP back, one request at a time.
No queue that blocks on a list can be faster; nothing is guaranteed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import load
from redis.asyncio import Redis


async def _take(connection: Redis, key: str) -> bytes:
    taken = await connection.blpop([key])
    assert taken is not None
    assert isinstance(taken[1], bytes)
    return taken[1]


async def _pong(url: str) -> None:
    async with Redis.from_url(url, socket_timeout=None) as connection:
        while True:
            await connection.lpush("pong", await _take(connection, "ping"))


def worker(url: str) -> None:
    asyncio.run(_pong(url))


@asynccontextmanager
async def client(url: str) -> AsyncIterator[load.Echo]:
    async with Redis.from_url(url, socket_timeout=None) as connection:

        async def echo_all(payloads: Sequence[bytes]) -> list[bytes]:
            await connection.lpush("ping", payloads[0])
            return [await _take(connection, "pong")]

        yield echo_all


if __name__ == "__main__":
    load.main(worker, load.Concurrent(client))
