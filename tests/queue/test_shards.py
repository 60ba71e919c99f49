"""A queue in several shards: keys, clients, workers' turns, and what is shown of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot
from support.fleets import Gated, Recorder, echo_body, submission, working
from support.queue.queues import Queue
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import UsageError
from leanq.queue.keys import Keys, new_request_id, shard_of
from leanq.queue.operator_queue import look
from leanq.queue.settings import Settings


@pytest.fixture
def three(settings: Settings) -> Settings:
    return replace(settings, shards=3)


@given(st.integers(1, 50), st.data())
def test_the_slots_of_shards_lie_evenly_over_the_cluster(shards: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, shards - 1))
    tag = Keys("leanq", shard, shards).tag
    assert tag.startswith(f"{{leanq:{shard}")
    assert key_slot(tag.encode()) * shards // 16384 == shard
    assert (Keys("leanq").lasting, Keys("leanq").tag) == ("{leanq:0}", "{leanq:0}{3}")
    assert 0 <= shard_of(new_request_id(shards)) < shards


async def test_requests_spread_and_replies_come_from_everywhere(three: Settings) -> None:
    async with working(three, slots=4), AsyncLeanQClient(three) as lean:
        payloads = [str(number).encode() for number in range(300)]
        assert await asyncio.gather(*map(lean.echo, payloads)) == payloads
    async with Queue.every(three) as queues:
        settled = [(await queue.status()).counters["settled"] for queue in queues]
    assert sum(settled) == 300
    assert min(settled) > 50


@pytest.mark.slow
async def test_one_slot_serves_all_shards_in_turn(three: Settings) -> None:
    driver = Recorder()
    async with Queue.every(three) as queues:
        for shard, queue in enumerate(queues):
            # Too long to be claimed ahead.
            batch = [submission(f"{shard}-{n}", echo_body(b"%d" % shard, 0.06)) for n in range(8)]
            await queue.submit("c", batch)
        async with working(three, driver, slots=1):
            await eventually(lambda: len(driver.started) == 24)
            await eventually(lambda: not driver.running)
    for start in range(0, 24, 3):
        assert Counter(driver.started[start : start + 3]) == {b"0": 1, b"1": 1, b"2": 1}


async def test_a_quarantined_of_one_shard_runs_alone_in_all(three: Settings) -> None:
    driver = Gated(b"quarantined", b"other")
    async with Queue.every(replace(three, max_attempts=2)) as queues:
        await queues[0].submit("c", [submission("0-quarantined", echo_body(b"quarantined"))])
        (job,) = (await queues[0].claim("dead", ["echo"], 1, busy=0, token="n:")).jobs
        await queues[0].release("dead", [(job.request_id, job.token)], how="retry", leave=True)
        await queues[1].submit("c", [submission("1-other", echo_body(b"other"))])
        async with working(replace(three, max_attempts=2, lease_s=0.9), driver, slots=8):
            for _ in range(2):
                await eventually(lambda: len(driver.running) == 1)
                (first,) = driver.running
                driver.gates[first].set()
                await eventually(lambda first=first: first not in driver.running)
        assert driver.most == 1
        assert len(driver.started) == 2


async def test_what_is_shown_is_the_whole_queue(three: Settings) -> None:
    async with Queue.every(three) as queues:
        for shard, queue in enumerate(queues):
            await queue.submit("c", [submission(f"{shard}-{n}", b"?") for n in range(shard + 1)])
        found = await look(three)
        (priority,) = found.priorities
        assert (priority.environment, priority.tenants, priority.waiting) == ("echo", 1, 6)
        assert found.counters["submitted"] == 6
        async with working(three, slots=7):
            (row,) = (await look(three)).workers
            assert row.lease_s > 0
            await eventually(lambda: _settled(three, 6))


async def _settled(settings: Settings, count: int) -> bool:
    return (await look(settings)).counters.get("settled") == count


def test_a_request_id_of_another_shard_is_refused(three: Settings) -> None:
    with LeanQClient(three) as lean, pytest.raises(UsageError, match="it has 3"):
        lean.attach(["3-elsewhere"])
    with pytest.raises(UsageError, match="LEANQ_SHARDS must lie between 1 and 1000, got 0"):
        replace(three, shards=0)
