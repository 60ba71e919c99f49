"""Loose pinning of requests that are identical to others: a run that is shared comes first."""

from __future__ import annotations

from typing import Any

from support.queue.shards import Shard, settlement

from leanq.queue.results import Claimed

TWIN: dict[str, Any] = {"digest": "same", "affinity": ("state",)}


def request_ids(claimed: Claimed) -> list[str]:
    return [job.request_id for job in claimed.jobs]


async def test_a_follower_alone_makes_its_environment_look_for_warm_workers(shard: Shard) -> None:
    await shard.submit("leader", digest="same")
    await shard.job()
    assert not shard.dump().affine
    await shard.submit("f", **TWIN)
    assert shard.dump().affine == {"a"}


async def test_among_what_waits_who_attaches_takes_no_place(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("cold1", "cold2")
    await shard.submit("t1", "t2", "t3", **TWIN)
    await shard.submit("warm", affinity=("state",))
    claimed = await shard.claim("w", 3)
    assert request_ids(claimed) == ["t1", "warm", "cold1"]
    found = shard.dump()
    found.check()
    assert found.joined == {"t1": ["t2", "t3"]}
    assert found.lists["wait"] == {"a:1:t": ["cold2"]}


async def test_a_run_without_its_client_still_makes_warm(shard: Shard) -> None:
    await shard.submit("leader", "f", **TWIN)
    (job,) = (await shard.claim("w", 2)).jobs
    assert await shard.queue.cancel(["leader"]) == [True]
    await shard.claim("w", 1, settle=[settlement(job, warm=True)])
    assert list(shard.dump().warm["a:state"]) == ["w"]


async def test_joined_requests_that_go_back_keep_their_affinities(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("leader", "f1", "f2", **TWIN)
    job = await shard.job("v")
    await shard.claim("v", 2)
    assert sorted(shard.dump().joined["leader"]) == ["f1", "f2"]
    await shard.queue.release("v", [("leader", job.token)])
    await shard.submit("cold", tenant="t")
    found = shard.dump()
    found.check()
    for request_id in ("leader", "f1", "f2"):
        assert (found.req[request_id]["st"], found.req[request_id]["a"]) == ("queued", "state")
    # A warm worker prefers one of them, which the others follow.
    job = await shard.job("w")
    assert job.request_id in ("leader", "f1", "f2")
    assert request_ids(await shard.claim("other")) == ["cold"]
    await shard.settle(job)
    assert set(shard.dump().req) == {"cold"}
