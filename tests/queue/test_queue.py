"""Each transition and its edges, on a real server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from support.queue.queues import Queue
from support.queue.shards import (
    LEASE_MS,
    Shard,
    at_the_time_of,
    open_shard,
    settlement,
    submission,
)

from leanq.errors import UnavailableError
from leanq.fleet.stats import environments_of
from leanq.queue.requests import Reply
from leanq.queue.results import Became, Job, Reaped, Renewed, Settlement, Stop
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply, unpack_reply


@pytest.fixture
async def shard(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shard]:
    small = replace(settings, lease_s=LEASE_MS / 1000, max_attempts=3, max_waiting=2000)
    async with open_shard(small, monkeypatch) as opened:
        yield opened


# Submit


async def test_submit_is_idempotent(shard: Shard) -> None:
    assert await shard.submit("r", "q", "r") == [Became.QUEUED, Became.QUEUED, Became.ATTACHED]
    assert await shard.submit("r", tenant="other", priority=0) == [Became.ATTACHED]
    found = shard.dump()
    assert found.lists["wait"] == {"a:1:t": ["r", "q"]}
    assert found.hashes["stats"] == {"submitted": "2", "waiting:a": "2"}


@pytest.mark.parametrize("other", [{"environment": "b"}, {"digest": "y"}], ids=str)
async def test_an_id_of_a_request_with_other_content_is_a_conflict(
    shard: Shard, other: dict[str, str]
) -> None:
    await shard.submit("r", "alone", digest="x")
    before = shard.dump()
    asked = {"client": "new", "body": b"other", "digest": "x", **other}
    assert await shard.submit("r", "r", **asked) == [Became.CONFLICT] * 2
    assert shard.dump() == before
    job = await shard.job()
    assert (job.request_id, job.digest) == ("r", "x")
    assert await shard.submit("r", **asked) == [Became.CONFLICT]
    await shard.settle(job)
    assert [request_id for request_id, _ in shard.dump().inbox["c"]] == ["r"]
    assert "new" not in shard.dump().inbox


async def test_submit_again_moves_the_request_to_the_new_clients_inbox(shard: Shard) -> None:
    await shard.submit("r", client="old")
    assert await shard.submit("r", client="new") == [Became.ATTACHED]
    await shard.settle(await shard.job())
    assert [request_id for request_id, _ in shard.dump().inbox["new"]] == ["r"]
    assert "old" not in shard.dump().inbox


async def test_submit_of_what_has_ended_brings_the_reply(shard: Shard) -> None:
    await shard.submit("r")
    job = await shard.job()
    await shard.settle(job)
    assert await shard.submit("r") == [settlement(job).reply]
    assert not shard.dump().req


async def test_environment_is_full_for_each_tenant_alone(shard: Shard) -> None:
    request_ids = [f"r{number}" for number in range(shard.settings.max_waiting)]
    assert set(await shard.submit(*request_ids)) == {Became.QUEUED}
    assert await shard.submit("more", "again") == [Became.FULL, Became.FULL]
    assert await shard.submit("more", tenant="u") == [Became.QUEUED]
    assert await shard.submit("again", environment="b") == [Became.QUEUED]
    # Whatever is in flight already is no matter of room.
    assert await shard.submit("r0") == [Became.ATTACHED]
    await shard.claim(want=1, environments=["a"])
    answers = await shard.submit("another", "one too many")
    assert answers == [Became.QUEUED, Became.FULL]


async def test_environment_is_unknown_once_workers_offer_others(shard: Shard) -> None:
    assert await shard.submit("early", environment="x") == [Became.QUEUED]
    await shard.queue.register("w", b"", {"a": b"", "b": b""})
    assert await shard.submit("r", environment="y") == [Became.UNKNOWN_ENVIRONMENT]
    assert await shard.submit("early", environment="x") == [Became.ATTACHED]
    assert await shard.submit("r", environment="b") == [Became.QUEUED]
    assert await shard.queue.environments() == ["a", "b"]


# Claim and settle


async def test_a_tenants_backlog_delays_anothers_request_by_one_round(shard: Shard) -> None:
    for start in range(0, 2000, 500):
        await shard.submit(*(f"many{number}" for number in range(start, start + 500)), tenant="big")
    assert (await shard.claim(want=1)).jobs[0].request_id == "many0"
    await shard.submit("single", tenant="small")
    claimed = [(await shard.claim(want=1)).jobs[0].request_id for _ in range(2)]
    assert claimed == ["many1", "single"]


async def test_a_claim_brings_no_more_than_it_asks_for(shard: Shard) -> None:
    for priority in range(3):
        await shard.submit(*(f"{priority} {n}" for n in range(30)), priority=priority)
    for want in (*range(1, 10), 8, 7):
        assert len((await shard.claim(want=want)).jobs) == want


async def test_settle_counts_once_and_answers_again_with_success(shard: Shard) -> None:
    await shard.submit("r")
    job = await shard.job()
    assert await shard.settle(job, job) == (True, True)
    again = Settlement("r", job.token, "rejected", pack_reply(job.token, Reply("rejected")))
    assert (await shard.claim(want=0, settle=[again])).accepted == (True,)
    assert await shard.settle(structs.replace(job, token="forged")) == (False,)
    assert await shard.end("r") == ("accepted", 1, 0)
    found = shard.dump()
    assert len(found.inbox["c"]) == 1
    stats = found.hashes["stats"]
    assert (stats["settled"], stats["verdict:accepted"], stats["fenced"]) == ("1", "1", "1")


async def test_a_batch_of_several_clients_and_tenants_stays_apart(shard: Shard) -> None:
    """Where records of a batch are alike, scripts read one for all."""
    batch = [submission(f"r{n}", body=b"%d" % n, tenant="tu"[n // 4]) for n in range(8)]
    for client in ("c", "d"):
        await shard.queue.submit(client, batch["cd".index(client) :: 2])
    late = submission("late", deadline_ms=1)
    await shard.queue.submit("c", [late, submission("other", longest_run_ms=5)])
    shard.advance(2)
    jobs = (await shard.claim(want=20)).jobs
    assert {job.request_id: job.body for job in jobs} == {
        **{item.request_id: item.body for item in batch},
        "other": b"body",
    }
    assert await shard.settle(*jobs) == (True,) * 9
    inbox = shard.dump().inbox
    told = {client: sorted(request_id for request_id, _ in inbox[client]) for client in "cd"}
    assert told["c"] == ["late", "other", "r0", "r2", "r4", "r6"]
    assert told["d"] == ["r1", "r3", "r5", "r7"]


async def test_every_end_is_counted_with_its_reason(shard: Shard) -> None:
    await shard.submit("proved", "wrong", "again")
    await shard.submit("same", "joined", digest="d")
    jobs = (await shard.claim()).jobs
    assert [job.request_id for job in jobs] == ["proved", "wrong", "again", "same"]
    ends = [settlement(jobs[0])]
    ends += [settlement(job, "rejected", reason="lean_error") for job in jobs[1:3]]
    ends += [settlement(jobs[3], "incomplete", reason="sorry")]
    for _ in ("first", "once more, which counts nothing"):
        assert (await shard.claim(want=0, settle=ends)).accepted == (True,) * 4
    await shard.submit("withdrawn")
    await shard.queue.cancel(["withdrawn"])
    await shard.submit("late", deadline_ms=1)
    shard.advance(2)
    await shard.queue.lookup("c", ["late"])
    await shard.submit("killer", environment="b")
    for _ in range(3):
        job = await shard.job(environments=["b"])
        await shard.queue.release("w", [("killer", job.token)], how="retry")
    expected = {
        "a": {"lean_error": 2, "sorry": 2, "withdrawn": 1, "deadline": 1},
        "b": {"too_many_deaths": 1},
    }
    environments = environments_of(await shard.queue.status())
    assert {name: dict(each.reasons) for name, each in environments.items()} == expected
    request_ids = ["proved", "joined", "withdrawn", "late", "killer"]
    replies = await shard.queue.replies(request_ids)
    reasons = [unpack_reply("", data or b"").reason for data in replies]
    assert reasons == [None, "sorry", "withdrawn", "deadline", "too_many_deaths"]


async def test_late_settle_after_reap_changes_nothing(shard: Shard) -> None:
    await shard.submit("r")
    late = await shard.job("slow")
    shard.advance(LEASE_MS)
    await shard.queue.reap()
    for _ in ("while it waits", "while another has it"):
        before = shard.dump()
        assert await shard.settle(late, worker="slow") == (False,)
        after = shard.dump()
        assert (after.req, after.reply, after.inbox) == (before.req, {}, {})
        job = await shard.job("other")
        await shard.queue.release("other", [("r", job.token)])
    job = await shard.job("other")
    assert await shard.settle(job, worker="other") == (True,)
    assert await shard.settle(late, worker="slow") == (False,)
    assert await shard.end("r") == ("accepted", 2, 0)


async def test_lost_answer_is_made_up_for_by_reconcile(shard: Shard) -> None:
    await shard.submit("r", "q")
    jobs = (await shard.claim()).jobs
    shard.advance(2000)
    reconciled, lost = await shard.queue.reconcile("w", ["q", "gone"])
    # As its worker sees it, it was claimed just now.
    now = {"queued_s": 2.0, "claimed_ms": jobs[0].claimed_ms + 2000}
    assert reconciled == (structs.replace(at_the_time_of(jobs[0], reconciled[0]), **now),)
    assert lost == ["gone"]


async def test_quarantined_is_reconciled_as_one_that_runs_alone(shard: Shard) -> None:
    await shard.quarantined("r")
    job = await shard.job()
    assert job.isolated
    (again,), lost = await shard.queue.reconcile("w", [])
    assert (again, lost) == (at_the_time_of(job, again), [])


@pytest.mark.slow
async def test_many_settlements_fit_into_one_call(shard: Shard) -> None:
    jobs: list[Job] = []
    for batch in range(9):
        request_ids = [f"r{batch}-{number}" for number in range(1000)]
        await shard.submit(*request_ids)
        claimed = (await shard.claim(want=9000)).jobs
        assert [job.request_id for job in claimed] == request_ids
        jobs += claimed
    # Lua itself unpacks no more than some 8,000 values.
    assert await shard.settle(*jobs) == (True,) * 9000
    assert not shard.dump().work


async def test_request_is_not_run_in_a_environment_that_it_left(shard: Shard) -> None:
    await shard.submit("r", environment="a")
    await shard.queue.cancel(["r"])
    shard.server.delete(shard.queue.keys.request("r"))  # as at the end of its time-to-live
    await shard.submit("r", environment="b")
    assert (await shard.claim(environments=["a"])).jobs == ()
    assert (await shard.queue.status()).counters["waiting:b"] == 1
    assert [job.request_id for job in (await shard.claim(environments=["b"])).jobs] == ["r"]


# Release, reap, renew


async def test_release_puts_back_to_the_front_and_costs_no_attempt(shard: Shard) -> None:
    await shard.submit("r1", "r2", "r3", "r4")
    jobs = (await shard.claim(want=3)).jobs
    assert await shard.queue.release("w", [(job.request_id, job.token) for job in jobs]) == 3
    assert shard.dump().lists["wait"] == {"a:1:t": ["r1", "r2", "r3", "r4"]}
    again = (await shard.claim(want=1)).jobs[0]
    assert (again.request_id, again.attempts) == ("r1", 1)
    assert again.token != jobs[0].token
    # The old lease gives nothing back any more.
    assert await shard.queue.release("w", [("r1", jobs[0].token)]) == 0
    assert await shard.queue.release("w", [("r1", again.token)], how="retry") == 1
    assert (await shard.job()).attempts == 2


async def test_worker_that_leaves_is_forgotten_unless_it_holds_work(shard: Shard) -> None:
    await shard.queue.register("w", b"info", {"a": b""})
    await shard.submit("r", "q")
    job, _ = (await shard.claim()).jobs
    await shard.queue.notify_worker("w")
    await shard.queue.release("w", [("r", job.token)], leave=True)
    assert list(shard.dump().workers) == ["w"]
    await shard.queue.cancel(["q"])
    await shard.queue.release("w", [], leave=True)
    found = shard.dump()
    assert (found.workers, found.hashes.get("info"), found.lists["stop"]) == ({}, None, {})


async def test_reap_takes_a_hundred_at_a_time_and_only_what_lapsed(shard: Shard) -> None:
    await shard.queue.register("dead", b"", {"a": b""})
    await shard.submit(*(f"r{number}" for number in range(152)))
    await shard.claim("dead", 150)
    shard.advance(1)
    await shard.claim("alive", 1)
    shard.advance(LEASE_MS - 2)
    assert await shard.queue.reap() == Reaped(0, 0, more=False)
    shard.advance(1)
    assert await shard.queue.reap() == Reaped(100, 0, more=True)
    assert "dead" in shard.dump().workers
    assert await shard.queue.reap() == Reaped(50, 0, more=True)
    assert await shard.queue.reap() == Reaped(0, 0, more=False)
    found = shard.dump()
    assert (list(found.workers), list(found.work)) == (["alive"], ["alive"])
    assert found.hashes["stats"]["waiting:a"] == "151"
    assert "info" not in found.hashes


async def test_worker_comes_back_to_life(shard: Shard) -> None:
    await shard.queue.register("w", b"", {"a": b""})
    await shard.submit("r")
    old = await shard.job()
    shard.advance(LEASE_MS)
    await shard.queue.reap()
    renewed = await shard.queue.renew("w")
    assert (renewed.known, renewed.held, renewed.lapsed) == (False, 0, False)
    assert await shard.queue.reconcile("w", ["r"]) == ((), ["r"])
    await shard.queue.register("w", b"", {"a": b""})
    assert (await shard.queue.renew("w")).known
    new = await shard.job()
    assert (new.request_id, new.attempts) == ("r", 2)
    assert await shard.settle(old) == (False,)
    assert await shard.settle(new) == (True,)


async def test_sign_of_life_keeps_the_work(shard: Shard) -> None:
    await shard.submit("r")
    await shard.job("w")
    await shard.queue.renew("other")
    for _ in range(5):
        shard.advance(LEASE_MS - 1)
        assert (await shard.queue.renew("w")).held == 1
        assert (await shard.queue.renew("other")).lapsed is False
    for lapsed in (False, True):
        shard.advance(LEASE_MS // 2)
        assert (await shard.queue.renew("other")).lapsed is lapsed


async def test_after_a_silence_of_all_each_worker_can_be_heard_before_leases_are_judged(
    shard: Shard,
) -> None:
    for worker in ("w1", "w2", "dead"):
        await shard.queue.register(worker, b"", {"a": b""})
        await shard.submit(worker, longest_run_ms=LEASE_MS)
        await shard.job(worker)
        await shard.queue.renew(worker)
    # The server is away, or its clock jumps.
    shard.advance(10 * LEASE_MS)
    assert await shard.queue.reap() == Reaped(0, 0, more=False, expiry_grace_s=LEASE_MS / 2000)
    assert await shard.queue.renew("w1") == Renewed(1, False, (), True)
    shard.advance(LEASE_MS // 2 - 1)
    assert await shard.queue.reap() == Reaped(0, 0, more=False, expiry_grace_s=0.001)
    assert await shard.queue.renew("w2") == Renewed(1, False, (), True)
    shard.advance(1)
    assert await shard.queue.renew("w1") == Renewed(0, True, ("w1",), True)
    assert await shard.queue.reap() == Reaped(1, 0, more=True)
    assert await shard.queue.reap() == Reaped(0, 0, more=False)
    assert set(shard.dump().workers) == {"w1", "w2"}


async def test_a_clock_that_goes_back_prolongs_neither_leases_nor_the_expiry_grace(
    shard: Shard,
) -> None:
    for worker in ("alive", "dead"):
        await shard.queue.register(worker, b"", {"a": b""})
        await shard.submit(worker)
        await shard.job(worker)
        await shard.queue.renew(worker)
    # It goes ahead first, so that an expiry grace begins by that time.
    for jump_ms in (100 * LEASE_MS, -100 * LEASE_MS):
        shard.advance(jump_ms)
        for _ in range(3):
            assert not (await shard.queue.renew("alive")).lapsed
            await shard.queue.renew("dead")
    shard.advance(-100 * LEASE_MS)
    assert not (await shard.queue.renew("alive")).lapsed
    for _ in range(2):
        shard.advance(LEASE_MS // 2)
        renewed = await shard.queue.renew("alive")
    assert (renewed.lapsed, renewed.held) == (True, 1)
    assert await shard.queue.reap() == Reaped(1, 0, more=True)
    assert set(shard.dump().workers) == {"alive"}


async def test_timed_out_is_taken_away_by_renew(shard: Shard) -> None:
    await shard.submit("r", longest_run_ms=5000)
    await shard.submit("q", longest_run_ms=5001)
    await shard.claim()
    shard.advance(4999)
    assert (await shard.queue.renew("w")).timed_out == ()
    shard.advance(1)
    renewed = await shard.queue.renew("w")
    assert (renewed.timed_out, renewed.held) == (("r",), 1)
    (job,) = (await shard.claim("other")).jobs
    assert (job.request_id, job.attempts) == ("r", 2)


async def test_reaper_is_not_stopped_by_a_request_that_was_deleted(shard: Shard) -> None:
    await shard.submit("r", "q")
    await shard.claim()
    shard.server.delete(f"{shard.tag}:req:r")
    shard.advance(LEASE_MS)
    assert await shard.queue.reap() == Reaped(1, 0, more=True)
    assert not shard.dump().work


# Cancel, deadlines


async def test_cancel(shard: Shard) -> None:
    await shard.submit("ended", "leased", "queued")
    jobs = (await shard.claim(want=2)).jobs
    await shard.settle(jobs[0])
    shard.advance(2000)
    answers = await shard.queue.cancel(["queued", "leased", "ended", "unknown", "queued"])
    assert answers == [True, True, False, False, False]
    assert await shard.queue.wait_wakeup("w", [], 5.0) == Stop("leased")
    for request_id, attempts in (("queued", 0), ("leased", 1)):
        assert await shard.end(request_id) == ("cancelled", attempts, 2)
    assert await shard.settle(jobs[1]) == (False,)
    assert (await shard.claim()).jobs == ()
    found = shard.dump()
    assert (found.req, found.work, found.lists["wait"]) == ({}, {}, {})
    assert found.hashes["stats"]["waiting:a"] == "0"


async def test_deadline_passes_in_the_queue(shard: Shard) -> None:
    await shard.submit("claimed", "looked up", deadline_ms=1000)
    await shard.submit("in time", tenant="u", deadline_ms=1001)
    shard.advance(1000)
    assert await shard.queue.lookup("c", ["claimed", "looked up"]) == [True, True]
    (job,) = (await shard.claim("early", 1)).jobs
    await shard.queue.release("early", [(job.request_id, job.token)])
    shard.advance(1)
    (answer,) = await shard.queue.lookup("d", ["looked up"])
    assert [answer] == await shard.queue.replies(["looked up"])
    assert await shard.end("looked up") == ("expired", 0, 1.001)
    jobs = (await shard.claim()).jobs
    assert [job.request_id for job in jobs] == ["in time"]
    assert await shard.end("claimed") == ("expired", 0, 1.001)
    inbox = shard.dump().inbox
    assert [request_id for request_id, _ in inbox["c"] + inbox["d"]] == ["claimed", "looked up"]
    # Once it runs, its deadline in the queue matters no more.
    shard.advance(1)
    assert await shard.queue.lookup("c", ["in time", "unknown"]) == [True, False]


# Quarantined requests


async def test_first_attempt_is_never_a_quarantined(shard: Shard) -> None:
    await shard.submit("r", "q")
    only = Queue(replace(shard.settings, max_attempts=1))
    job = await shard.job()
    await only.release("w", [("r", job.token)])
    await only.close()
    assert [(job.request_id, job.isolated) for job in (await shard.claim()).jobs] == [
        ("r", False),
        ("q", False),
    ]


async def test_quarantined_runs_alone(shard: Shard) -> None:
    await shard.submit("first", environment="b")
    await shard.quarantined("r")
    await shard.submit("other")
    claimed = await shard.claim(environments=["b", "a"])
    assert [(job.request_id, job.isolated, job.attempts) for job in claimed.jobs] == [
        ("r", True, 3)
    ]
    assert await shard.queue.release("w", [("r", claimed.jobs[0].token)]) == 1
    # Released without its attempt counting it is still at its last attempt.
    assert (await shard.job()).isolated


async def test_busy_worker_empties_itself_for_a_quarantined(shard: Shard) -> None:
    await shard.quarantined("r", environment="b")
    await shard.submit("q1", "q2", "q3")
    # In whatever order it serves its environments, it takes nothing more.
    claimed = await shard.claim("holder", environments=["a", "b"], busy=1)
    assert (claimed.jobs, claimed.must_empty) == ((), True)
    # One worker is enough.
    claimed = await shard.claim("other", 1, environments=["a", "b"], busy=1)
    assert ([job.request_id for job in claimed.jobs], claimed.must_empty) == (["q1"], False)
    claimed = await shard.claim("holder", environments=["a", "b"])
    assert ([job.request_id for job in claimed.jobs], claimed.must_empty) == (["r"], False)
    assert not shard.dump().isolating


async def test_hold_lasts_as_long_as_its_worker_asks(shard: Shard) -> None:
    await shard.quarantined("r")
    assert (await shard.claim("holder", busy=1)).must_empty
    isolating = f"{shard.tag}:isolating:a"
    shard.server.pexpire(isolating, LEASE_MS)
    assert not (await shard.claim("other", busy=1)).must_empty
    assert shard.server.pttl(isolating) <= LEASE_MS
    assert (await shard.claim("holder", busy=1)).must_empty
    assert shard.server.pttl(isolating) > LEASE_MS


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_no_worker_empties_itself_for_a_quarantined_that_ended(
    shard: Shard, end: str
) -> None:
    await shard.quarantined("r", deadline_ms=1000)
    await shard.submit("q")
    if end == "cancelled":
        await shard.queue.cancel(["r"])
    shard.advance(1001)
    claimed = await shard.claim(busy=1)
    assert ([job.request_id for job in claimed.jobs], claimed.must_empty) == (["q"], False)
    assert await shard.end("r") == (end, 2, 0 if end == "cancelled" else 1.001)


# Exchanges


@pytest.mark.parametrize("digest", ["", "d"])
async def test_one_for_one_is_an_exchange(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    await shard.submit("first", digest=digest and f"{digest}1")
    await shard.submit("next", digest=digest and f"{digest}2")
    job = (await shard.claim(want=1)).jobs[0]
    called = spied_on(shard.queue, monkeypatch)
    claimed = await shard.claim(want=1, settle=[settlement(job)])
    assert (claimed.accepted, claimed.held) == ((True,), 1)
    assert [job.request_id for job in claimed.jobs] == ["next"]
    last = await shard.claim(want=1, settle=[settlement(claimed.jobs[0])])
    assert (last.accepted, last.held, last.jobs) == ((True,), 0, ())
    assert called == ["exchange", "exchange"]
    assert not shard.dump().work


async def test_what_the_settled_run_would_share_is_left_to_claim(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shard.submit("first", "next", digest="d")
    job = (await shard.claim(want=1)).jobs[0]
    called = spied_on(shard.queue, monkeypatch)
    claimed = await shard.claim(want=1, settle=[settlement(job)])
    assert [job.request_id for job in claimed.jobs] == ["next"]
    assert called == ["exchange", "claim"]


async def test_what_is_unusual_is_left_to_claim(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shard.submit("first", "next")
    job = (await shard.claim(want=1)).jobs[0]
    await shard.queue.set_paused("tenant", "nobody", paused=True)
    called = spied_on(shard.queue, monkeypatch)
    claimed = await shard.claim(want=1, settle=[settlement(job)])
    assert (claimed.accepted, [job.request_id for job in claimed.jobs]) == ((True,), ["next"])
    claimed = await shard.claim(want=1, settle=[settlement(claimed.jobs[0])])
    assert (claimed.accepted, claimed.jobs) == ((True,), ())
    # What lasts is not asked for with each claim.
    assert called == ["exchange", "claim", "claim"]


async def test_an_exchange_counts_tenants_beyond_the_bound_together(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shard.submit("first", "next")
    shard.server.hset(f"{shard.tag}:stats", "tenants", 100)
    job = await shard.job()
    called = spied_on(shard.queue, monkeypatch)
    for _ in range(2):
        done = structs.replace(settlement(job), cpu_ms=5)
        claimed = await shard.claim(want=1, settle=[done])
        job = (*claimed.jobs, job)[0]
    assert called == ["exchange", "exchange"]
    assert shard.server.hget(f"{shard.tag}:stats", "u:a:") == b"10"


async def test_an_entry_of_what_waits_elsewhere_now_is_left_to_claim(shard: Shard) -> None:
    await shard.submit("first", "front", "moved", tenant="s")
    await shard.submit("other", "another", tenant="t")
    job = await shard.job()
    # Its reply is over, while its id stands in the list still, behind the front one's.
    await shard.queue.cancel(["moved"])
    shard.server.delete(f"{shard.tag}:req:moved")
    await shard.submit("moved", "last", tenant="t")
    served = []
    for _ in range(5):
        (job,) = (await shard.claim(want=1, settle=[settlement(job)])).jobs
        served.append(job.request_id)
    assert served == ["other", "front", "another", "moved", "last"]
    found = shard.dump()
    assert not found.lists["ring"]
    assert "withdrawn" not in found.hashes


@pytest.mark.parametrize(
    "harmed",
    ["stats settled", "stats turn:a", "stats f:a:accepted", "warm:a:x", "inbox:c", "wakeup:a"],
)
async def test_a_hostile_value_loses_no_request(shard: Shard, harmed: str) -> None:
    pinned = harmed.startswith("warm")
    await shard.submit("first", "next", "last", affinity=("x",) if pinned else ())
    job = await shard.job()
    shard.harm(harmed)
    # Whom to tell, and whom to wake, is not known; all else goes on.
    expected = UnavailableError if harmed in ("inbox:c", "wakeup:a") else ()
    for _ in range(3):
        with contextlib.suppress(expected):
            await shard.claim(want=1, settle=[settlement(job, warm=pinned)])
    leased = {job.request_id for job in (await shard.queue.reconcile("w", []))[0]}
    waits = set(shard.server.lrange(f"{shard.tag}:wait:a:1:t", 0, -1))
    assert leased - {"first"} | {name.decode() for name in waits} == {"next", "last"}
    # What is asked for again does not bring more than it asks for.
    assert len(leased) <= 2


@pytest.mark.parametrize("harmed", ["stats waiting:a", "stats minute", "ring:a:1", "wakeup:a"])
async def test_a_hostile_value_loses_no_request_on_its_way_in(shard: Shard, harmed: str) -> None:
    await shard.submit("first", "second")
    shard.harm(harmed)
    with contextlib.suppress(UnavailableError):
        await shard.submit("new", tenant="u")
    shard.server.delete(f"{shard.tag}:{harmed.partition(' ')[0]}")
    # A client that was not told asks, and submits again what is not known.
    if await shard.queue.lookup("c", ["new"]) == [False]:
        await shard.submit("new", tenant="u")
    if harmed.startswith("ring"):
        shard.server.rpush(f"{shard.tag}:ring:a:1", "t", "u")
    claimed = {job.request_id for job in (await shard.claim(want=9)).jobs}
    assert claimed == {"first", "second", "new"}


def spied_on(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the scripts that it calls from now on."""
    called: list[str] = []
    run = queue.run

    async def spy(name: str, uploads: Any = None, /, **arguments: Any) -> Any:
        called.append(name)
        return await run(name, uploads, **arguments)

    monkeypatch.setattr(queue, "run", spy)
    return called
