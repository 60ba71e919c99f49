"""SAQ: `concurrency=40`, `max_concurrent_ops=100`, orjson, uvloop. The client waits by
`Queue.listen` and then gets the job, since `Queue.apply` polls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import load
import orjson
import uvloop
from saq import Job, Worker
from saq.queue.redis import RedisQueue
from saq.types import Context


async def echo(_: Context, *, payload: str) -> str:
    return payload


def _queue(url: str) -> RedisQueue:
    return RedisQueue.from_url(url, dump=orjson.dumps, load=orjson.loads, max_concurrent_ops=100)


def worker(url: str) -> None:
    async def work() -> None:
        await Worker(_queue(url), [echo], concurrency=40).start()

    uvloop.run(work())


async def _call(queue: RedisQueue, payload: bytes) -> bytes:
    job = Job(function="echo", kwargs={"payload": payload.decode()}, key=uuid4().hex)
    heard = queue.listen([job.key], lambda _, status: status == "complete", timeout=None)
    over = asyncio.create_task(heard)
    await asyncio.sleep(0)  # It listens before the request can end.
    await queue.enqueue(job)
    await over
    done = await queue.job(job.key)
    assert done is not None
    return str(done.result).encode()


async def _await_worker(queue: RedisQueue) -> None:
    """Until it has swept once: before that, it aborts what it has fetched but not yet begun."""
    swept = queue.namespace("sweep")
    while not (  # noqa: ASYNC110 - it happens in another process
        await queue.redis.pubsub_numpat() and await queue.redis.exists(swept)
    ):
        await asyncio.sleep(0.01)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[load.Echo]:
    queue = _queue(url)
    await queue.connect()
    # One listener that never ends, since the queue unsubscribes with its last one.
    forever = asyncio.create_task(queue.listen(["none"], lambda *_: False, timeout=None))
    await _await_worker(queue)

    async def echo_all(payloads: Sequence[bytes]) -> list[bytes]:
        return [await _call(queue, payload) for payload in payloads]

    yield echo_all
    forever.cancel()
    await queue.disconnect()


if __name__ == "__main__":
    load.main(worker, load.Concurrent(client, run=uvloop.run))
