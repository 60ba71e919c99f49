"""BullMQ for Python: `concurrency` 2 (more costs latency and brings no throughput on requests that
do nothing), `addBulk` by 20, `removeOnComplete`, uvloop; results by `QueueEvents`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import load
import uvloop
from bullmq import Job, Queue, QueueEvents, Worker
from redis.connection import parse_url


async def echo(job: Job, _: str) -> str:
    return str(job.data["payload"])


def _options(url: str) -> dict[str, Any]:
    # redis-py's own limit of 5 s would cut its blocking reads, and their events are then late.
    return {"connection": {**parse_url(url), "socket_timeout": None}}


def worker(url: str) -> None:
    async def work() -> None:
        await Worker("bench", echo, {**_options(url), "concurrency": 2, "autorun": False}).run()

    uvloop.run(work())


class _Replies:
    """Replies by job id, whether asked for before they come or after."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[str]] = {}

    def of(self, job: str) -> asyncio.Future[str]:
        return self._futures.setdefault(job, asyncio.get_running_loop().create_future())

    def completed(self, event: dict[str, str], _: str) -> None:
        self.of(event["jobId"]).set_result(event["returnvalue"])

    async def take(self, job: str) -> bytes:
        reply = await self.of(job)
        del self._futures[job]
        return reply.encode()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[load.Echo]:
    queue = Queue("bench", _options(url))
    events = QueueEvents("bench", {**_options(url), "lastEventId": "0"})
    replies = _Replies()
    events.on("completed", replies.completed)

    async def echo_all(payloads: Sequence[bytes]) -> list[bytes]:
        options = {"removeOnComplete": True}
        datas = [{"payload": payload.decode()} for payload in payloads]
        if len(datas) == 1:
            jobs = [await queue.add("echo", datas[0], options)]
        else:
            bulk = [{"name": "echo", "data": data, "opts": options} for data in datas]
            jobs = await queue.addBulk(bulk)
        return [await replies.take(job.id) for job in jobs]

    yield echo_all
    await events.close()
    await queue.close()


if __name__ == "__main__":
    load.main(worker, load.Concurrent(client, chunk=20, run=uvloop.run))
