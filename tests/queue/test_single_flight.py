"""Identical requests in the queue: one runs, the others wait for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs
from support.queue.shards import LEASE_MS, Shard, at_the_time_of, open_shard, settlement

from leanq.queue.requests import Reply
from leanq.queue.results import Became, Job, Reaped
from leanq.queue.wire import pack_reply, unpack_reply


async def lead(shard: Shard, *joined: str, client: str = "c") -> Job:
    """The job of ``leader``, which ``joined``, of the same kind, join."""
    await shard.submit("leader", digest="same")
    job = await shard.job()
    assert job.request_id == "leader"
    answers = await shard.submit(*joined, client=client, digest="same")
    assert answers == [Became.QUEUED] * len(joined)
    return job


async def verdicts(shard: Shard, *request_ids: str) -> list[str | None]:
    ends = [await shard.end(request_id) for request_id in request_ids]
    return [end and end[0] for end in ends]


async def runs(shard: Shard, want: int = 10) -> list[str]:
    return [job.request_id for job in (await shard.claim(want=want)).jobs]


# One runs


async def test_one_runs_and_its_reply_is_for_all(shard: Shard) -> None:
    job = await lead(shard, "f1", "f2", client="d")
    assert await runs(shard) == []
    # No worker is woken for one that attaches.
    assert shard.wakeup() == 1
    assert await shard.queue.lookup("d", ["f1", "f2"]) == [True, True]
    assert await shard.submit("f2", client="e", digest="same") == [Became.ATTACHED]
    await shard.settle(job)
    found = shard.dump()
    found.check()
    told = {client: request_id for client, ((request_id, _),) in found.inbox.items()}
    assert told == {"c": "leader", "d": "f1", "e": "f2"}
    assert set(found.reply.values()) == {settlement(job).reply}
    assert not found.run
    assert found.hashes["stats"] == {
        "submitted": "3",
        "claimed": "1",
        "settled": "1",
        "coalesced": "2",
        "joined": "0",
        "verdict:accepted": "3",
        "waiting:a": "0",
        "turn:a": "1",
    }
    # An answer lost on the wire is asked for again.
    assert await shard.settle(job) == (True,)
    assert await shard.settle(structs.replace(job, token="forged")) == (False,)


@pytest.mark.parametrize("want", [1, 10])
async def test_what_waits_attaches_when_its_turn_comes(shard: Shard, want: int) -> None:
    for tenant in "tuv":
        await shard.submit(f"{tenant}1", f"{tenant}2", tenant=tenant, digest="same")
    job = (await shard.claim(want=want)).jobs[0]
    assert await runs(shard, want=want) == []
    assert sorted(shard.dump().joined[job.request_id]) == ["t2", "u1", "u2", "v1", "v2"]
    await shard.settle(job)
    shard.dump().check()
    assert set(await verdicts(shard, "t1", "t2", "u1", "u2", "v1", "v2")) == {"accepted"}


async def test_only_the_same_digest_in_the_same_environment_attaches(shard: Shard) -> None:
    await lead(shard)
    await shard.submit("other", digest="other")
    await shard.submit("none1", "none2")
    await shard.submit("elsewhere", digest="same", environment="b")
    assert await runs(shard) == ["other", "none1", "none2"]
    assert (await shard.job(environments=["b"])).request_id == "elsewhere"


async def test_two_prefixes_do_not_see_each_other(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lead(shard)
    settings = replace(shard.settings, prefix=f"{shard.settings.prefix}.other")
    async with open_shard(settings, monkeypatch) as other:
        await other.submit("r", digest="same")
        assert await runs(other) == ["r"]


async def test_who_comes_after_the_end_runs_anew(shard: Shard) -> None:
    await shard.settle(await lead(shard))
    await shard.submit("late", digest="same")
    assert await runs(shard) == ["late"]


async def test_a_full_line_is_no_matter_to_who_attaches(shard: Shard) -> None:
    await lead(shard)
    shard.queue.settings = replace(shard.settings, max_waiting=1)
    assert await shard.submit("waits", "f") == [Became.QUEUED, Became.FULL]
    assert await shard.submit("f", digest="same") == [Became.QUEUED]


async def test_attaching_costs_a_tenant_no_more_than_being_passed_over(shard: Shard) -> None:
    async def order(digest: str) -> list[str]:
        await shard.submit(f"{digest}lead", digest=f"{digest}same", tenant="z")
        await shard.claim(want=1)
        twins = [f"{digest}s1", f"{digest}s2", f"{digest}u1"]
        # There is none to attach to as they are submitted.
        leader = shard.server.hget(f"{shard.tag}:phase", f"r:a:{digest}same")
        shard.server.hdel(f"{shard.tag}:phase", f"r:a:{digest}same")
        await shard.submit(*twins[:2], tenant="s", digest=f"{digest}same")
        await shard.submit(f"{digest}s3", f"{digest}s4", tenant="s")
        await shard.submit(f"{digest}t1", f"{digest}t2", tenant="t")
        await shard.submit(twins[2], tenant="u", digest=f"{digest}same")
        await shard.submit(f"{digest}u2", tenant="u")
        shard.server.hset(f"{shard.tag}:phase", f"r:a:{digest}same", leader or "")
        taken = [(await shard.job()).request_id.removeprefix(digest) for _ in range(5)]
        assert await runs(shard) == []
        return taken

    # The tenants of s1 and s2, and of u1, have had their turns with these.
    assert await order("joined-") == ["t1", "t2", "u2", "s3", "s4"]


async def test_a_thousand_follow_and_the_next_leads_anew(shard: Shard) -> None:
    job = await lead(shard, *(f"f{number}" for number in range(1000)))
    await shard.submit("next", "last", digest="same")
    second = await shard.job()
    assert second.request_id == "next"
    assert await runs(shard) == []
    await shard.settle(job)
    found = shard.dump()
    found.check()
    assert (len(found.reply), found.joined) == (1001, {"next": ["last"]})
    # The one that came first does not take the lead from the one that has it now.
    assert found.run == {"a:same": "next"}
    await shard.settle(second)
    assert not shard.dump().req


async def test_copies_of_a_large_reply_end_somewhere(shard: Shard) -> None:
    job = await lead(shard, *(f"f{number:02}" for number in range(40)))
    reply = pack_reply(job.token, Reply("accepted", payload=bytes(1 << 20)))
    await shard.claim(want=0, settle=[structs.replace(settlement(job), reply=reply)])
    assert len(shard.dump().reply) == 16
    # The others run, and no attempt counts.
    again = await shard.job()
    assert again.attempts == 1
    assert await runs(shard) == []
    await shard.settle(again)
    assert len(shard.dump().reply) == 41


async def test_what_sharing_costs_on_the_server(shard: Shard) -> None:
    def calls() -> int:
        stats = shard.server.info("commandstats").values()
        return sum(row["calls"] for row in stats)

    async def life(request_id: str, digest: str) -> list[int]:
        spent = [calls()]
        await shard.submit(request_id, digest=digest)
        spent.append(calls())
        job = await shard.job()
        spent.append(calls())
        await shard.settle(job)
        spent.append(calls())
        return [late - early for early, late in pairwise(spent)]

    await life("the scripts are sent", "")
    plain, shared = await life("plain", ""), await life("shared", "same")
    extra = [more - less for more, less in zip(shared, plain, strict=True)]
    assert extra == [1, 0, 2]


# Withdrawn and expired


async def test_a_follower_is_withdrawn_alone(shard: Shard) -> None:
    job = await lead(shard, "f1", "f2")
    assert await shard.queue.cancel(["f1", "f1"]) == [True, False]
    await shard.settle(job)
    shard.dump().check()
    assert await verdicts(shard, "leader", "f1", "f2") == ["accepted", "cancelled", "accepted"]


async def test_a_withdrawn_leader_runs_on_for_its_joined_requests(shard: Shard) -> None:
    job = await lead(shard, "f1", client="d")
    assert await shard.queue.cancel(["leader", "leader"]) == [True, False]
    assert await verdicts(shard, "leader") == ["cancelled"]
    assert not shard.dump().lists["stop"]
    # It is over for those that ask, and runs for those that come.
    (data,) = await shard.queue.replies(["leader"])
    assert await shard.queue.lookup("c", ["leader"]) == [data]
    assert await shard.submit("leader", digest="same") == [data]
    await shard.submit("f2", client="d", digest="same")
    shard.dump().check()
    (again,), lost = await shard.queue.reconcile("w", [])
    assert (again, lost) == (at_the_time_of(job, again), [])
    assert await shard.settle(job) == (True,)
    found = shard.dump()
    found.check()
    assert await verdicts(shard, "leader", "f1", "f2") == ["cancelled", "accepted", "accepted"]
    assert found.hashes["stats"]["verdict:accepted"] == "2"
    assert not found.req


@pytest.mark.parametrize("ends", ["withdrawn", "expired"])
async def test_the_last_follower_takes_a_withdrawn_leaders_run_along(
    shard: Shard, ends: str
) -> None:
    job = await lead(shard)
    await shard.submit("f1", "f2", digest="same", deadline_ms=1000)
    await shard.queue.cancel(["leader", "f1"])
    assert not shard.dump().lists["stop"]
    if ends == "withdrawn":
        await shard.queue.cancel(["f2"])
    else:
        shard.advance(1001)
        await shard.queue.lookup("c", ["f2"])
    found = shard.dump()
    found.check()
    assert found.lists["stop"] == {"w": ["leader"]}
    assert (found.req, found.run, found.work) == ({}, {}, {})
    assert await shard.settle(job) == (False,)


async def test_a_withdrawn_leader_that_is_sent_again_is_its_clients_once_more(shard: Shard) -> None:
    job = await lead(shard, "f")
    await shard.queue.cancel(["leader"])
    shard.server.delete(shard.queue.keys.request("leader"))  # as at the end of its time-to-live
    assert await shard.queue.lookup("c", ["leader"]) == [False]
    assert await shard.submit("leader", digest="same", client="d") == [Became.ATTACHED]
    await shard.settle(job)
    assert await verdicts(shard, "leader", "f") == ["accepted", "accepted"]
    assert not shard.dump().req


async def test_each_keeps_its_own_deadline(shard: Shard) -> None:
    job = await lead(shard)
    await shard.submit("asks", "silent", digest="same", deadline_ms=1000)
    await shard.submit("patient", digest="same", deadline_ms=5000)
    shard.advance(1001)
    assert await shard.queue.lookup("c", ["leader", "patient"]) == [True, True]
    (data,) = await shard.queue.lookup("c", ["asks"])
    assert isinstance(data, bytes)
    assert unpack_reply("asks", data).verdict == "expired"
    shard.dump().check()
    await shard.settle(job)
    shard.dump().check()
    assert await verdicts(shard, "leader", "patient") == ["accepted", "accepted"]
    assert await verdicts(shard, "asks", "silent") == ["expired", "expired"]
    assert shard.dump().hashes["stats"]["coalesced"] == "1"


# Runs that end without a verdict


async def lapse(shard: Shard, job: Job) -> None:
    shard.advance(LEASE_MS)
    assert await shard.queue.reap() == Reaped(1, 0, more=True)


async def timed_out(shard: Shard, job: Job) -> None:
    for _ in range(13):
        shard.advance(LEASE_MS // 2)
        renewed = await shard.queue.renew("w")
    assert "leader" not in shard.dump().work.get("w", {}), renewed


async def release(shard: Shard, job: Job) -> None:
    await shard.queue.release("w", [("leader", job.token)])


async def retry(shard: Shard, job: Job) -> None:
    await shard.queue.release("w", [("leader", job.token)], how="retry")


@pytest.mark.parametrize(
    ("end", "attempts"), [(lapse, 1), (timed_out, 1), (retry, 1), (release, 0)]
)
async def test_joined_requests_go_back_to_their_own_lines_as_their_leader_does(
    shard: Shard, end: Callable[[Shard, Job], Awaitable[None]], attempts: int
) -> None:
    await shard.queue.register("w", b"", {})
    job = await lead(shard, "f1")
    await shard.submit("f2", tenant="u", priority=0, digest="same")
    await shard.submit("behind", tenant="u", priority=0)
    await end(shard, job)
    found = shard.dump()
    found.check()
    assert found.lists["wait"] == {"a:0:u": ["f2", "behind"], "a:1:t": ["f1", "leader"]}
    assert {fields["n"] for request_id, fields in found.req.items() if request_id != "behind"} == {
        str(attempts)
    }
    assert shard.wakeup() > 0
    jobs = {job.request_id: job for job in (await shard.claim("x")).jobs}
    assert set(jobs) == {"f2", "behind"}
    await shard.settle(*jobs.values(), worker="x")
    ends = [await shard.end(request_id) for request_id in ("f1", "f2", "leader")]
    # The attempts are those of the request that ran.
    assert ends == [("accepted", attempts + 1, ends[0] and ends[0][2])] * 3


async def test_a_withdrawn_leader_is_not_run_again(shard: Shard) -> None:
    job = await lead(shard, "f")
    await shard.queue.cancel(["leader"])
    await retry(shard, job)
    shard.dump().check()
    assert [(job.request_id, job.attempts) for job in (await shard.claim()).jobs] == [("f", 2)]


async def test_like_quarantined_share_one_run_alone_and_its_end(shard: Shard) -> None:
    await lead(shard, *(request_ids := ["f1", "f2"]))
    for _ in range(shard.settings.max_attempts - 1):
        (held,) = shard.dump().work["w"]
        token = shard.dump().req[held]["tok"]
        await shard.queue.release("w", [(held, token)], how="retry")
        (job,) = (await shard.claim()).jobs
    assert job.isolated
    found = shard.dump()
    found.check()
    assert len(found.joined[job.request_id]) == 2
    await shard.queue.release("w", [(job.request_id, job.token)], how="retry")
    found = shard.dump()
    found.check()
    assert await verdicts(shard, "leader", *request_ids) == ["poisoned"] * 3
    letters = [await shard.queue.dead_letter(request_id) for request_id in request_ids]
    assert [letter and (letter.attempts, letter.worker) for letter in letters] == [(3, "w")] * 2


async def test_a_quarantined_neither_follows_a_run_beside_others_nor_waits_for_it(
    shard: Shard,
) -> None:
    await shard.submit("old", digest="same")
    for _ in range(shard.settings.max_attempts - 1):
        job = await shard.job("killed")
        await shard.queue.release("killed", [("old", job.token)], how="retry")
    await shard.submit("young", digest="same")
    # A worker that is busy leaves the quarantined request to others, once another empties itself
    # for it.
    assert (await shard.claim("holder", 1, busy=1)).must_empty
    assert (await shard.job("busy", busy=1)).request_id == "young"
    job = await shard.job("idle")
    assert (job.request_id, job.isolated) == ("old", True)
    await shard.submit("new", digest="same")
    assert shard.dump().joined == {"old": ["new"]}
    shard.dump().check()


async def test_an_isolated_run_stays_one_when_it_is_told_by_a_younger_request(
    shard: Shard,
) -> None:
    await shard.quarantined("old", digest="same")
    assert (await shard.job()).isolated
    await shard.submit("young", digest="same")
    await shard.queue.cancel(["old"])
    (job,), lost = await shard.queue.reconcile("w", [])
    assert (job.request_id, job.isolated, lost) == ("old", True, [])
    shard.dump().check()


@pytest.mark.parametrize("how", ["reap", "renew"])
async def test_one_call_sends_back_many_joined_requests_of_few(shard: Shard, how: str) -> None:
    leaders = {f"leader{number}": f"d{number}" for number in range(3)}
    for request_id, digest in leaders.items():
        await shard.submit(request_id, digest=digest, longest_run_ms=1000)
    await shard.queue.register("w", b"", {})
    await shard.claim()
    for digest in leaders.values():
        await shard.submit(*(f"{digest}-{each}" for each in range(1000)), digest=digest)
    shard.advance(LEASE_MS if how == "reap" else 1000)
    for request_id in leaders:
        if how == "reap":
            assert await shard.queue.reap() == Reaped(1, 0, more=True)
        else:
            assert (await shard.queue.renew("w")).timed_out == (request_id,)
    (found := shard.dump()).check()
    assert (len(found.req), found.work) == (3003, {})


@pytest.mark.parametrize("lost", ["the leader", "that it is leased", "who follows it"])
async def test_no_request_waits_for_a_run_that_is_none(shard: Shard, lost: str) -> None:
    job = await lead(shard, "f")
    match lost:
        case "the leader":
            shard.server.delete(f"{shard.tag}:req:leader", f"{shard.tag}:processing:w")
            shard.server.hdel(f"{shard.tag}:phase", "leader")
        case "that it is leased":
            # A reaper of an older release puts back the leader alone.
            shard.server.hdel(f"{shard.tag}:phase", "leader")
            shard.server.delete(f"{shard.tag}:processing:w")
            shard.server.rpush(f"{shard.tag}:wait:a:1:t", "leader")
            shard.server.rpush(f"{shard.tag}:ring:a:1", "t")
            shard.server.hincrby(f"{shard.tag}:stats", "waiting:a", 1)
        case _:
            shard.server.delete(f"{shard.tag}:joined:leader")
    assert await shard.queue.lookup("c", ["f"]) == [True]
    found = shard.dump()
    assert (found.req["f"]["st"], found.req["f"]["n"]) == ("queued", "0")
    assert "f" in found.lists["wait"]["a:1:t"]
    # Nor does what comes next attach to it.
    job = (await shard.claim()).jobs[0] if lost != "who follows it" else job
    await shard.settle(job)
    for rest in (await shard.claim()).jobs:
        await shard.settle(rest)
    assert await verdicts(shard, "f") == ["accepted"]
    assert not shard.dump().req
