"""Loose pinning of requests that are identical to others: a run that is shared comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from support.shards import Shard, settlement

from leanq.queue.requests import Reply
from leanq.queue.results import Claimed, Queued, Returning
from leanq.queue.wire import pack_reply

TWIN: dict[str, Any] = {"digest": "same", "affinity": ("state",)}


def request_ids(claimed: Claimed) -> list[str]:
    return [job.request_id for job in claimed.jobs]


async def counters(shard: Shard) -> tuple[int, int, int]:
    """Hits, misses and reassignments."""
    found = (await shard.queue.status()).counters
    return found.get("warm_hits", 0), found.get("warm_misses", 0), found.get("reassignments", 0)


async def test_a_run_is_followed_rather_than_reserved_anew(shard: Shard) -> None:
    await shard.warm("w", "state", available=2)
    await shard.submit("leader", **TWIN)
    (job,) = (await shard.claim("w", 2)).jobs
    assert await shard.submit("f", **TWIN) == [Queued()]
    found = shard.dump()
    found.check()
    assert found.joined == {"leader": ["f"]}
    assert not found.lists["reservation"]
    # It has taken nothing of what is available.
    assert found.hashes["available"] == {"w": "1"}
    await shard.submit("other", affinity=("state",))
    assert shard.dump().lists["reservation"] == {"w": ["other"]}
    assert request_ids(await shard.claim("w", 1, settle=[settlement(job)])) == ["other"]
    assert await shard.end("f") == ("accepted", 1, 0)


async def part_twins(shard: Shard, *reserved: str) -> None:
    """``leader`` runs at the worker v, and others of its kind are reserved to the worker w."""
    await shard.warm("v", "header")
    await shard.warm("w", "state", available=3)
    await shard.submit("leader", digest="same", affinity=("header",))
    await shard.submit(*reserved, **TWIN)
    assert shard.dump().lists["reservation"] == {"v": ["leader"], "w": list(reserved)}
    assert request_ids(await shard.claim("v", 1)) == ["leader"]


async def test_what_was_reserved_attaches_when_its_worker_claims(shard: Shard) -> None:
    await part_twins(shard, "reserved")
    await shard.submit("other", affinity=("state",))
    before = await counters(shard)
    # It fills no slot, so that there is one for the other.
    assert request_ids(await shard.claim("w", 1)) == ["other"]
    found = shard.dump()
    found.check()
    assert found.joined == {"leader": ["reserved"]}
    assert (found.req["reserved"]["on"], found.req["reserved"]["w"]) == ("leader", "v")
    assert await counters(shard) == (before[0] + 1, before[1], before[2])
    ((leader,), _) = await shard.queue.reconcile("v", [])
    await shard.settle(leader, worker="v")
    assert await shard.end("reserved") == ("accepted", 1, 0)


async def test_twins_that_are_reserved_together_run_once(shard: Shard) -> None:
    await shard.warm("w", "state", available=3)
    await shard.submit("r1", "r2", "r3", **TWIN)
    job = await shard.job("w")
    found = shard.dump()
    found.check()
    # A claim without room gave the others up before they could attach.
    assert found.lists["wait"] == {"a:1:t": ["r2", "r3"]}
    assert (await shard.claim("other")).jobs == ()
    assert shard.dump().joined == {"r1": ["r2", "r3"]}
    await shard.settle(job)
    assert not shard.dump().req


async def test_who_only_attaches_is_as_available_as_before(shard: Shard) -> None:
    await part_twins(shard, "p1", "p2")
    claimed = await shard.claim("w", 3)
    assert claimed.jobs == ()
    found = shard.dump()
    found.check()
    assert found.joined == {"leader": ["p1", "p2"]}
    assert (found.hashes["available"], found.reservations) == ({"w": "3"}, {})
    # It may watch, since nothing keeps it busy.
    assert claimed.again_s > 0
    await shard.submit("n1", "n2", "n3", "n4", affinity=("state",))
    found = shard.dump()
    assert found.lists["reservation"] == {"w": ["n1", "n2", "n3"]}
    assert found.lists["wait"] == {"a:1:t": ["n4"]}


@pytest.mark.parametrize(("how", "attempts"), [("requeue", 1), ("retry", 2)])
async def test_joined_requests_that_go_back_keep_affinities_and_have_no_reservation(
    shard: Shard, how: Returning, attempts: int
) -> None:
    await part_twins(shard, "reserved")
    await shard.submit("f", **TWIN)
    assert (await shard.claim("w", 3)).jobs == ()
    assert sorted(shard.dump().joined["leader"]) == ["f", "reserved"]
    ((leader,), _) = await shard.queue.reconcile("v", [])
    await shard.queue.release("v", [(leader.request_id, leader.token)], how=how)
    found = shard.dump()
    found.check()
    assert not found.lists["reservation"]
    for request_id in ("f", "reserved"):
        assert (found.req[request_id]["st"], found.req[request_id]["a"]) == ("queued", "state")
    assert sorted(found.lists["wait"]["a:1:t"]) == ["f", "leader", "reserved"]
    # A warm worker prefers one of its own, which the others follow.
    job = await shard.job("w")
    assert (job.request_id in ("f", "reserved"), job.attempts) == (True, attempts)
    assert (await shard.claim("other")).jobs == ()
    shard.dump().check()
    await shard.settle(job)
    assert not shard.dump().req


async def test_a_follower_alone_makes_its_environment_look_for_warm_workers(shard: Shard) -> None:
    await shard.submit("leader", digest="same")
    await shard.job()
    assert not shard.dump().affine
    await shard.submit("f", **TWIN)
    assert shard.dump().affine == {"a"}


async def test_what_was_stolen_attaches_as_well(shard: Shard) -> None:
    await part_twins(shard, "reserved")
    await shard.submit("other", affinity=("state",))
    shard.advance(100)
    hits, misses, reassignments = await counters(shard)
    assert request_ids(await shard.claim("thief", 2)) == ["other"]
    found = shard.dump()
    found.check()
    assert found.joined == {"leader": ["reserved"]}
    # Two were stolen, and one of them was taken.
    assert await counters(shard) == (hits, misses + 1, reassignments + 2)
    assert found.hashes["available"] == {"thief": "1"}


async def test_a_remembered_verdict_comes_before_any_reservation(shard: Shard) -> None:
    shard.queue.settings = replace(shard.settings, remember_s=60.0)
    await shard.queue.register("w", b"", {"a": b""}, {"a": "print"})
    await shard.submit("first", **TWIN)
    job = await shard.job("w")
    told = Reply("accepted", fingerprint="print")
    done = structs.replace(
        settlement(job, warm=True), fingerprint="print", reply=pack_reply("", told)
    )
    await shard.claim("w", 2, settle=[done])
    assert shard.dump().hashes["available"] == {"w": "2"}
    assert await shard.submit("again", **TWIN) == [done.reply]
    found = shard.dump()
    assert not found.lists["reservation"]
    assert not found.reservations
    assert found.hashes["available"] == {"w": "2"}
    await shard.submit("other", digest="another", affinity=("state",))
    assert shard.dump().lists["reservation"] == {"w": ["other"]}


async def test_among_what_waits_who_attaches_takes_no_place(shard: Shard) -> None:
    await shard.warm("w", "state", available=0)
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
    await shard.submit("next", affinity=("state",))
    assert shard.dump().lists["reservation"] == {"w": ["next"]}


async def test_a_reserved_twin_can_be_withdrawn_before_and_after(shard: Shard) -> None:
    await part_twins(shard, "before", "after")
    assert await shard.queue.cancel(["before"]) == [True]
    assert (await shard.claim("w", 3)).jobs == ()
    assert shard.dump().joined == {"leader": ["after"]}
    assert await shard.queue.cancel(["after"]) == [True]
    found = shard.dump()
    found.check()
    assert (set(found.req), found.hashes["available"]) == ({"leader"}, {"w": "3"})
