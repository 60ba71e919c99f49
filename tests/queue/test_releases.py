"""Two releases on one queue, as while it is upgraded: scripts and messages of both."""

from __future__ import annotations

import asyncio

import msgpack
import pytest
from support.fleets import Recorder, submission, working
from support.queue.queues import Queue

import leanq.queue.shard
from leanq.client import AsyncLeanQClient
from leanq.queue.operator_queue import look
from leanq.queue.results import Submission
from leanq.queue.settings import Settings

COUNT = 200


async def test_scripts_and_messages_of_two_releases_side_by_side(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = leanq.queue.shard.script_text
    old, new = Recorder(), Recorder()
    async with working(settings, old, slots=4), AsyncLeanQClient(settings) as lean:
        # Those who use it so far keep the scripts that they have.
        assert await lean.echo(b"before") == b"before"
        monkeypatch.setattr(
            leanq.queue.shard, "script_text", lambda name: f"{ours(name)}\n-- newer\n"
        )
        async with working(settings, new, slots=4), AsyncLeanQClient(settings) as newer:
            payloads = [b"%d" % number for number in range(COUNT)]
            # A later release may know more fields.
            fields = {"v": 1, "op": "echo", "delay_s": 0.001, "hint": {"from": "the future"}}
            queue = Queue(settings)
            batch: list[Submission] = []
            for payload in payloads:
                body = bytes(msgpack.packb({**fields, "payload": payload}))
                batch.append(submission(f"0-{payload.decode()}", body))
            await queue.submit("c", batch)
            replies = await asyncio.gather(*(newer.attach(item.request_id) for item in batch))
            assert [reply.payload for reply in replies] == payloads
            assert await asyncio.gather(*map(lean.echo, payloads)) == payloads
            assert await asyncio.gather(*map(newer.echo, payloads)) == payloads
            await queue.close()
    assert min(len(old.started), len(new.started)) > COUNT / 10
    counters = (await look(settings)).counters
    assert counters["settled"] == counters["submitted"] == 3 * COUNT + 1
