"""Bytes in the queue that leanq has not written: nothing crashes, and each request ends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack
import pytest
import redis.asyncio as redis
from support.fleets import working
from support.producer.routes import first_shard
from support.queue.queues import Queue

from leanq.client import AsyncLeanQClient
from leanq.errors import LostError, RequestError
from leanq.queue.keys import Keys, new_request_id
from leanq.queue.requests import Message, Reply, Request
from leanq.queue.results import Submission
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply, pack_request

COUNT = 300

pytestmark = pytest.mark.usefixtures("swept")

GOOD = (
    pack_request(Request(op="echo", payload=b"good")),
    pack_request(Request(op="check", code="theorem t : True := trivial", allow_axioms=("a",))),
    pack_reply("token", Reply("rejected", (Message("error", 1, 2, "no", 3, 4),), axioms=("x",))),
)


def hostile(rng: random.Random) -> bytes:
    """Noise, a value of any shape, or a good message of which something is changed."""
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(40))
        case 1:
            depth = rng.randrange(1, 5000)
            return b"\x91" * depth
        case 2:
            fields: dict[str, Any] = {"v": 1, "op": "echo", "payload": b"x", "verdict": "accepted"}
            fields[rng.choice(["op", "delay_s", "payload", "timeout_s", "verdict"])] = rng.choice(
                [None, -1, 1e308, "x", [], {}, True, 2**63, msgpack.Timestamp(1)]
            )
            body: Any = fields if rng.random() < 0.5 else ["token", 1, fields]
            return bytes(msgpack.packb(body))
        case 3:
            return b"\xdd\xff\xff\xff\xff"
        case _:
            good = bytearray(rng.choice(GOOD))
            for _ in range(rng.randrange(1, 6)):
                good[rng.randrange(len(good))] = rng.randrange(256)
            return bytes(good[: rng.randrange(1, len(good) + 1)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_requests(settings: Settings, seed: int) -> None:
    rng = random.Random(seed)
    queue = Queue(settings)
    request_ids = [new_request_id(1) for _ in range(COUNT)]
    bodies = [hostile(rng) for _ in request_ids]
    batch = [
        Submission(request_id, "echo", "t", 1, 0, 60_000, body)
        for request_id, body in zip(request_ids, bodies, strict=True)
    ]
    await queue.submit("hostile", batch)
    async with AsyncLeanQClient(settings) as lean, working(settings, slots=16):
        # Random bytes can ask for a long delay, or be of a later version.
        waits = [asyncio.create_task(lean.attach(request_id)) for request_id in request_ids]
        done, waiting = await asyncio.wait(waits, timeout=3)
        assert len(done) > COUNT / 2
        for task in done:
            assert task.exception() is None or isinstance(task.exception(), RequestError)
        assert await lean.echo(b"next") == b"next"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_replies(settings: Settings, seed: int) -> None:
    rng = random.Random(seed)
    keys = Keys(settings.prefix)
    connection = redis.from_url(settings.url)
    async with AsyncLeanQClient(settings) as lean, working(settings, slots=16):
        request_ids = [new_request_id(1) for _ in range(COUNT)]
        for request_id in request_ids:
            await connection.set(keys.request(request_id), hostile(rng), px=60_000)
        ends = await asyncio.gather(*map(lean.attach, request_ids), return_exceptions=True)
        # One may be of another release, whose worker never comes.
        known = Reply | RequestError | LostError
        assert [end for end in ends if not isinstance(end, known)] == []
        # And where replies are read as they come.
        shard_client = first_shard(lean)
        inbox = keys.of("inbox", shard_client.client)
        waits = [
            asyncio.create_task(lean.echo(b"held", 3600, request_id=new_request_id(1)))
            for _ in range(50)
        ]
        await asyncio.sleep(0)
        outstanding = list(shard_client.outstanding)
        for request_id in outstanding:
            await connection.xadd(inbox, {request_id: hostile(rng) or b"?", hostile(rng): b"?"})
        ends = await asyncio.gather(*waits, return_exceptions=True)
        strange = [end for end in ends if not isinstance(end, bytes | RequestError)]
        assert not strange
        # They run all the same, and fill the slots.
        queue = Queue(settings)
        await queue.cancel(outstanding)
        await queue.close()
        assert await lean.echo(b"next") == b"next"
    await connection.aclose()
