"""Verdicts that are remembered, where the settings ask for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from support.queue.queues import Queue
from support.queue.shards import Shard, settlement

from leanq.queue.results import Became, Submitted


@pytest.fixture
def remembering(shard: Shard) -> Shard:
    shard.queue.settings = replace(shard.settings, remember_s=60.0)
    return shard


async def tell(shard: Shard, request_id: str, fingerprint: str, **fields: str) -> bytes:
    """Runs a request; the reply."""
    await shard.submit(request_id, **fields)
    done = structs.replace(settlement(await shard.job()), fingerprint=fingerprint)
    await shard.claim(want=0, settle=[done])
    return done.reply


async def test_a_remembered_verdict_answers_at_once(remembering: Shard) -> None:
    shard = remembering
    await shard.queue.register("w", b"", {"a": b"", "b": b""}, {"a": "print", "b": "print"})
    reply = await tell(shard, "first", "print", digest="same")
    shard.queue.settings = replace(shard.queue.settings, max_waiting=1)
    await shard.submit("fills the line")
    assert await shard.submit("second", digest="same") == [reply]
    assert await shard.submit("third", digest="same", environment="b") == [reply]
    # It is the reply from then on, also for who asks later.
    assert await shard.queue.lookup("d", ["second"]) == [reply]
    assert await shard.submit("second", digest="same") == [reply]
    found = shard.dump()
    found.check({"second", "third"})
    assert found.hashes["stats"]["remembered"] == "2"
    ttl_s = shard.server.ttl(f"{shard.tag}:verdict:print:same")
    assert 0 < ttl_s <= 60


@pytest.mark.parametrize(
    ("fields", "prints"),
    [
        ({"digest": "other"}, {"a": "print"}),
        ({"digest": ""}, {"a": "print"}),
        ({"digest": "same"}, {"a": "another"}),
        ({"digest": "same"}, {}),
    ],
)
async def test_nothing_else_is_answered_so(
    remembering: Shard, fields: dict[str, str], prints: dict[str, str]
) -> None:
    shard = remembering
    await tell(shard, "first", "print", digest="same")
    await shard.queue.register("w", b"", {"a": b""}, prints)
    assert await shard.submit("second", **fields) == [Became.QUEUED]


async def test_an_environments_old_verdicts_count_again_when_it_is_as_it_was(
    remembering: Shard,
) -> None:
    shard = remembering
    answers: list[Submitted] = []
    for number, fingerprint in enumerate(("old", "new", "old")):
        await shard.queue.register("w", b"", {"a": b""}, {"a": fingerprint})
        answers += await shard.submit(f"r{number}", digest="same")
        for job in (await shard.claim()).jobs:
            done = structs.replace(settlement(job), fingerprint=fingerprint)
            await shard.claim(want=0, settle=[done])
    assert [isinstance(answer, bytes) for answer in answers] == [False, False, True]


@pytest.mark.parametrize("why", ["not asked for", "no verdict of Lean's", "no digest"])
async def test_what_is_not_remembered(shard: Shard, why: str) -> None:
    remembering = Queue(replace(shard.settings, remember_s=60.0))
    if why != "not asked for":
        shard.queue.settings = remembering.settings
    await shard.queue.register("w", b"", {"a": b""}, {"a": "print"})
    fingerprint = "" if why == "no verdict of Lean's" else "print"
    await tell(shard, "first", fingerprint, digest="" if why == "no digest" else "same")
    assert not shard.dump().verdict
    shard.queue.settings = remembering.settings
    assert await shard.submit("second", digest="same") == [Became.QUEUED]
    await remembering.close()


async def test_who_does_not_ask_for_it_is_not_answered_from_memory(remembering: Shard) -> None:
    shard = remembering
    await shard.queue.register("w", b"", {"a": b""}, {"a": "print"})
    await tell(shard, "first", "print", digest="same")
    shard.queue.settings = replace(shard.settings, remember_s=0.0)
    assert await shard.submit("second", digest="same") == [Became.QUEUED]
