"""The reaper on workers that never were: leases taken by the test and left to lapse."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.fleets import (
    Recorder,
    counter,
    counts,
    echo_body,
    new_token,
    short_lease,
    submission,
    working,
)
from support.queue.queues import Queue
from support.queue.shards import open_shard
from support.servers import own_server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.errors import UnavailableError
from leanq.queue.results import Reaped
from leanq.queue.settings import Settings
from leanq.queue.worker_queue import reap, reap_all

NOTHING = Reaped(0, 0, more=False)


async def submit(queue: Queue, count: int) -> list[str]:
    request_ids = [f"0-{n}" for n in range(count)]
    await queue.submit(
        "me", [submission(request_id, echo_body(request_id.encode())) for request_id in request_ids]
    )
    return request_ids


async def vanish(queue: Queue, count: int, worker: str = "vanished") -> None:
    """Claims with a short lease, without ever a sign of life again; returns when it lapsed."""
    brief = Queue(short_lease(queue.settings))
    claimed = await brief.claim(worker, ["echo"], count, busy=0, token=new_token())
    assert len(claimed.jobs) == count
    await brief.close()

    async def lapsed() -> bool:
        rows = (await queue.status()).workers
        return all(row.lease_s < 0 for row in rows if row.worker == worker)

    await eventually(lapsed)


async def test_where_nothing_is_overdue_nothing_is_reaped(queue: Queue) -> None:
    assert await reap(queue) == NOTHING
    (request_id,) = await submit(queue, 1)
    await queue.claim("alive", ["echo"], 1, busy=0, token=new_token())
    assert await reap(queue) == NOTHING
    assert [row.held for row in (await queue.status()).workers] == [1]
    await queue.cancel([request_id])
    await queue.release("alive", [], leave=True)


async def test_a_worker_that_is_left_alone_reaps_after_the_expiry_grace(queue: Queue) -> None:
    """Only the reaper is heard, so its own waiting must not begin another grace period."""
    brief = Queue(short_lease(queue.settings))
    assert await reap(brief) == NOTHING
    (request_id,) = await submit(queue, 1)
    await vanish(queue, 1)
    # Silence for more than half of a lease.
    assert (await reap(brief)).expiry_grace_s > 0
    assert await reap_all([brief], through_expiry_grace=True) == Reaped(1, 0, more=False)
    await brief.close()
    await queue.claim("alive", ["echo"], 1, busy=0, token=new_token())
    await queue.cancel([request_id])
    await queue.release("alive", [], leave=True)


async def test_the_work_of_all_that_vanished_comes_back_in_order(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    request_ids = await submit(queue, 350)
    for number in range(2):
        brief = Queue(short_lease(settings))
        await brief.claim(f"vanished{number}", ["echo"], 25, busy=0, token=new_token())
        await brief.close()
    await vanish(queue, 250)
    # The last of them was the last to vanish, and one call takes 100 requests at most.
    assert await reap(queue) == Reaped(300, 0, more=False)
    assert await reap(queue) == NOTHING
    assert await counter(queue, "reaped") == 300
    assert not (await queue.status()).workers
    driver = Recorder()
    async with working(settings, driver):
        replies = await asyncio.gather(*(lean.attach(request_id) for request_id in request_ids))
    assert [reply.attempts for reply in replies] == 300 * [2] + 50 * [1]
    # What was begun before comes before what was not.
    assert {payload.decode() for payload in driver.started[:300]} == set(request_ids[:300])


@pytest.mark.slow
async def test_a_request_that_takes_workers_down_is_poisoned(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    (request_id,) = await submit(queue, 1)
    for attempt in range(settings.max_attempts):
        await vanish(queue, 1)
        last = attempt == settings.max_attempts - 1
        assert await reap(queue) == Reaped(int(not last), int(last), more=False)
    reply = await lean.attach(request_id)
    assert (reply.verdict, reply.attempts) == ("poisoned", settings.max_attempts)
    assert (await queue.status()).dead == 1


@pytest.mark.slow
async def test_reapers_do_each_other_no_harm(queue: Queue, settings: Settings) -> None:
    request_ids = await submit(queue, 500)
    await vanish(queue, 500)
    others = [Queue(settings) for _ in range(3)]
    found = await asyncio.gather(*(reap(other) for other in others))
    assert sum(one.requeued for one in found) == 500
    assert await counter(queue, "waiting:echo") == 500
    for other in others:
        await other.close()
    await queue.cancel(request_ids)
    async with working(settings):
        await submit(queue, 1)
        await eventually(counts(queue, "waiting:echo", 0))


async def test_a_worker_reaps_when_another_is_overdue(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    (request_id,) = await submit(queue, 1)
    await vanish(queue, 1)
    async with working(short_lease(settings)):
        assert (await lean.attach(request_id)).attempts == 2


async def test_without_a_server_it_says_so() -> None:
    with own_server() as server:
        queue = Queue(server.settings)
        assert await reap(queue) == NOTHING
        server.stop()
        with pytest.raises(UnavailableError):
            await reap(queue)
        await queue.close()


async def test_half_of_an_odd_lease_is_a_whole_number_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(settings, lease_s=1.001)
    async with open_shard(odd, monkeypatch) as shard:
        await shard.queue.renew("w")
        shard.advance(5000)
        assert (await shard.queue.reap()).expiry_grace_s == 0.5
        await shard.queue.release("w", [], leave=True)
