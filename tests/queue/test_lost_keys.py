"""What scripts do where the server has lost keys, or others have written them, and other rare ends.

Each of these is a branch that no other test reaches; see ``support/queue/lua_checks.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from support.queue.queues import Queue
from support.queue.shards import LARGE, Shard, settlement

from leanq.queue.results import Became


async def test_a_ring_whose_list_is_gone_gives_nothing(shard: Shard) -> None:
    ring = f"{shard.tag}:ring:a:1"
    shard.server.rpush(ring, "t")
    assert not (await shard.claim("w", 1)).jobs
    await shard.submit("r1")
    job = await shard.job()
    shard.server.rpush(ring, "t")
    # As one call that settles and claims.
    claimed = await shard.claim("w", 1, settle=[settlement(job)])
    assert (claimed.accepted, claimed.jobs) == ((True,), ())
    assert not shard.server.exists(ring)


async def test_a_request_is_withdrawn_from_a_list_that_is_gone(shard: Shard) -> None:
    await shard.submit("r1")
    shard.server.delete(f"{shard.tag}:wait:a:1:t")
    assert await shard.queue.cancel(["r1"]) == [True]
    assert not shard.server.exists(f"{shard.tag}:withdrawn", f"{shard.tag}:ring:a:1")


async def test_the_least_urgent_alone_is_claimed_at_once(shard: Shard) -> None:
    await shard.submit("r1", "r2", priority=2)
    done = structs.replace(settlement(await shard.job()), way="warm")
    claimed = await shard.claim("w", 1, settle=[done])
    assert [job.request_id for job in claimed.jobs] == ["r2"]
    done = structs.replace(settlement(*claimed.jobs), way="warm")
    await shard.claim("w", 0, settle=[done])
    assert (await shard.queue.status()).counters["way:warm"] == 2


async def test_a_wake_up_is_not_passed_on_in_a_paused_environment(shard: Shard) -> None:
    await shard.queue.set_paused("environment", "a", paused=True)
    await shard.queue.notify("a")
    assert shard.wakeup() == 0
    await shard.queue.set_paused("environment", "a", paused=False)
    await shard.queue.notify("a")
    assert shard.wakeup() == 1


async def test_a_lease_without_its_record_is_not_given_again(shard: Shard) -> None:
    await shard.submit("r1")
    await shard.job()
    shard.server.delete(shard.queue.keys.request("r1"))
    assert await shard.queue.reconcile("w", []) == ((), [])


async def test_a_withdrawn_run_without_those_who_joined_is_not_given_again(shard: Shard) -> None:
    await shard.submit("r1", "r2", digest="d")
    await shard.claim()
    assert await shard.queue.cancel(["r1"]) == [True]
    shard.server.delete(f"{shard.tag}:joined:r1")
    assert await shard.queue.reconcile("w", []) == ((), [])


async def test_a_charged_lease_comes_back_after_the_last_weight_has_gone(shard: Shard) -> None:
    await shard.queue.set_weight("t", 2.0)
    await shard.submit("r1")
    job = await shard.job()
    await shard.queue.set_weight("t", None)
    assert await shard.queue.release("w", [(job.request_id, job.token)]) == 1
    assert (await shard.job()).request_id == "r1"


async def test_nothing_waits_where_nothing_was_counted(shard: Shard) -> None:
    assert (await shard.queue.renew("w", ["never"])).waiting == 0


async def test_a_request_whose_lease_is_gone_is_reaped_with_its_worker(shard: Shard) -> None:
    await shard.submit("r1")
    await shard.job()
    shard.server.hdel(f"{shard.tag}:phase", "r1")
    await shard.lapse()
    assert (await shard.queue.reap()).requeued == 1
    assert (await shard.job("v")).attempts == 2


async def test_a_joined_request_without_its_run_may_have_had_all_attempts(shard: Shard) -> None:
    await shard.submit("r1", "r2", digest="d")
    job = await shard.job()
    await shard.claim("w", 1)
    await shard.queue.release("w", [(job.request_id, job.token)], how="retry")
    for _ in range(2):
        await shard.claim("w", 1)
    run, joined = ("r1", "r2") if "r1" in shard.dump().work["w"] else ("r2", "r1")
    shard.server.hdel(f"{shard.tag}:phase", run)
    few = Queue(replace(shard.settings, max_attempts=1))
    assert await few.lookup("c", [joined]) == [True]
    (reply,) = await few.lookup("c", [joined])
    assert isinstance(reply, bytes)
    assert await shard.end(joined) == ("poisoned", 1, 0.0)
    await few.close()


async def test_others_beside_a_run_are_left_alone(shard: Shard) -> None:
    """Names of requests that never joined it."""
    joined = f"{shard.tag}:joined:r1"
    await shard.submit("r1", digest="d")
    await shard.job()
    shard.server.zadd(joined, {"ghost": 1})
    await shard.lapse()
    assert (await shard.queue.reap()).requeued == 1
    job = await shard.job("v")
    shard.server.zadd(joined, {"ghost": 1})
    assert await shard.settle(job, worker="v") == (True,)
    assert not shard.server.exists(joined, f"{shard.tag}:req:ghost")
    assert (await shard.queue.status()).counters.get("coalesced", 0) == 0


async def test_another_run_of_the_same_stays_when_one_goes_back(shard: Shard) -> None:
    await shard.submit("r1", digest="d")
    job = await shard.job()
    shard.server.hset(f"{shard.tag}:phase", "r:a:d", "another")
    await shard.queue.release("w", [(job.request_id, job.token)])
    assert shard.server.hget(f"{shard.tag}:phase", "r:a:d") == b"another"


async def test_a_disagreement_without_its_request_leaves_no_letter(shard: Shard) -> None:
    await shard.submit("r1")
    job = await shard.job()
    shard.server.delete(shard.queue.keys.request("r1"))
    done = settlement(job, "unjudged", reason="kernels_disagree")
    assert (await shard.claim("w", 0, settle=[done])).accepted == (True,)
    assert await shard.queue.dead_request_ids(9, disagreed=True) == []
    assert await shard.end("r1")


async def test_too_many_accounts_of_a_ring_begin_anew(shard: Shard) -> None:
    key = f"{shard.tag}:shares:a:1"
    shard.server.hset(key, mapping={f"t{n}": "1 1" for n in range(2001)})
    await shard.queue.set_weight("t", 2.0)
    await shard.submit("r1")
    await shard.job()
    assert {*shard.server.hkeys(key)} == {b"", b"t"}


async def test_a_snapshot_without_its_place_is_not_kept(shard: Shard) -> None:
    about = {"key": "s", "manifest": b"m", "ttl_ms": 1000}
    assert await shard.queue.run("snapshot_keep", **about, chunks=["h"]) == 0
    room = {"bytes": 1, "budget": 9, "max_snapshots": 1, "coming_ms": 1000, "chunks": ["h"]}
    assert await shard.queue.run("snapshot_room", key="s", **room) == [1]
    assert await shard.queue.run("snapshot_keep", **about, chunks=["h", "i"]) == 0
    assert await shard.queue.run("snapshot_keep", **about, chunks=["h"]) == 0


async def test_a_memory_that_is_gone_shows_nothing(shard: Shard) -> None:
    shard.server.zadd(f"{shard.tag}:replay:names", {"gone": 1})
    assert (await shard.queue.status()).memories == {}
    assert await shard.queue.run("replay_refuse", name="gone", refused=1, evict=1) is None
    sample = {"count": 1, "max_bytes": 1, "by_weight": False, "randoms": b""}
    assert await shard.queue.run("replay_sample", name="gone", **sample) is None


async def test_a_withdrawn_run_does_not_answer_for_other_content(shard: Shard) -> None:
    await shard.submit("r1", "r2", digest="d")
    await shard.claim()
    assert await shard.queue.cancel(["r1"]) == [True]
    # Its reply has ended.
    shard.server.delete(shard.queue.keys.request("r1"))
    assert await shard.submit("r1", digest="other") == [Became.CONFLICT]


async def test_withdrawn_requests_take_no_room(shard: Shard) -> None:
    small = Queue(replace(shard.settings, max_waiting=2))
    await shard.submit("r1", "r2")
    assert await shard.queue.cancel(["r2"]) == [True]
    shard.queue, whole = small, shard.queue
    assert await shard.submit("r3") == [Became.QUEUED]
    assert await shard.submit("r4") == [Became.FULL]
    shard.queue = whole
    await small.close()


async def test_a_warm_request_joins_the_run_of_its_like(shard: Shard) -> None:
    await shard.warm("w", "x")
    await shard.submit("r1", "r2", affinity=("x",), digest="d")
    job = await shard.job()
    assert not (await shard.claim("w", 1)).jobs
    assert await shard.settle(job) == (True,)
    assert await shard.end("r2")


async def test_the_oldest_letters_go(shard: Shard) -> None:
    letters = {f"old{n}": n for n in range(10_000)}
    shard.server.zadd(f"{shard.tag}:dead", letters)
    shard.server.hset(f"{shard.tag}:deadreq:old0", "n", 3)
    await shard.quarantined("r1", body=LARGE)
    (job,) = (await shard.claim("w", 1)).jobs
    # Its body has gone as well.
    shard.server.delete(f"{shard.tag}:body:r1")
    await shard.queue.release("w", [("r1", job.token)], how="retry")
    assert shard.server.zcard(f"{shard.tag}:dead") == 10_000
    assert not shard.server.exists(f"{shard.tag}:deadreq:old0")
    assert shard.server.hget(f"{shard.tag}:deadreq:r1", "body") == b""


@pytest.mark.parametrize("reservoir", [0, 1])
async def test_random_numbers_may_run_out(shard: Shard, reservoir: int) -> None:
    """Then a memory draws fewer, and shrinks with the next call."""
    run, memory = shard.queue.run, {"name": "m"}
    bounds = {"entries": 9, "max_bytes": 20, "reservoir": reservoir, "weighted": 1}
    await run("replay_open", **memory, **bounds)
    write = {**memory, "writer": "w", "writer_ms": 1000}
    items = [(1.0, b"0123456789") for _ in range(3)]
    first = await run("replay_write", **write, serial="1", randoms=b"", items=items)
    assert await run("replay_write", **write, serial="1", randoms=b"", items=items) == first
    await run("replay_write", **write, serial="2", randoms=bytes(60), items=[(0.0, b"more")])
    for by_weight in (True, False):
        sample = {"count": 9, "max_bytes": 10**6, "by_weight": by_weight}
        assert await run("replay_sample", **memory, **sample, randoms=b"12345") == []
    # A memory whose log is gone counts from nothing.
    shard.server.delete(shard.queue.keys.of("replay", "m", "log"))
    assert await run("replay_refuse", **memory, refused=2, evict=5) == 2
    await run("replay_drop", **memory)
