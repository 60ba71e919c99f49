"""Bodies and replies too large for scripts: where they lie, and that nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import redis
from msgspec import structs
from support.fleets import Recorder, Wire, echo_body, submission, working
from support.queue.queues import Queue
from support.queue.shards import LARGE, LEASE_MS, Shard, open_shard, settlement
from support.servers import own_server

from leanq.client import AsyncLeanQClient
from leanq.errors import QueueFullError, RequestError, UnavailableError
from leanq.queue.operator_queue import send_again
from leanq.queue.requests import Reply
from leanq.queue.results import Became, Job, Settlement
from leanq.queue.scripts import LARGE_BYTES
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply
from leanq.queue.worker_queue import WorkerQueue

OTHER = b"y" * len(LARGE)


@pytest.fixture
async def shard(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shard]:
    small = replace(settings, lease_s=LEASE_MS / 1000, max_attempts=3, max_waiting=3)
    async with open_shard(small, monkeypatch) as opened:
        yield opened


def large(job: Job, **options: Any) -> Settlement:
    return settlement(job, payload=OTHER, **options)


def uploads(shard: Shard) -> list[bytes]:
    return [*shard.server.scan_iter(f"{shard.tag}:upload:*", count=10_000)]


def check(shard: Shard, *bodies: str) -> None:
    """These requests have a body that stays, and there is no other one, nor an upload."""
    found = shard.dump()
    found.check()
    assert found.body == dict.fromkeys(bodies, LARGE)
    assert {shard.server.ttl(shard.queue.keys.of("body", name)) for name in bodies} <= {-1}
    assert uploads(shard) == []


def lose_uploads(shard: Shard, monkeypatch: pytest.MonkeyPatch, first: int = 0) -> None:
    """From now on all uploads but the first ones are gone when their script looks."""
    run = shard.queue.run

    async def forgetful(
        name: str, uploads: Mapping[str, bytes] | None = None, /, **arguments: Any
    ) -> Any:
        return await run(name, dict([*(uploads or {}).items()][:first]), **arguments)

    monkeypatch.setattr(shard.queue, "run", forgetful)


async def test_a_body_and_a_reply_are_kept_out_of_scripts(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    run = shard.queue.run

    async def measured(
        name: str, uploads: Mapping[str, bytes] | None = None, /, **arguments: Any
    ) -> Any:
        answer = await run(name, uploads, **arguments)
        seen.append(len(repr((arguments, answer))))
        return answer

    monkeypatch.setattr(shard.queue, "run", measured)
    assert await shard.submit("r", "q", body=LARGE) == [Became.QUEUED, Became.QUEUED]
    check(shard, "r", "q")
    first = await shard.job()
    assert (first.request_id, first.body) == ("r", LARGE)
    (second,) = (await shard.claim(want=1, settle=[large(first)])).jobs
    assert (second.request_id, second.body) == ("q", LARGE)
    check(shard, "q")
    assert (await shard.claim(want=2, settle=[large(second)])).accepted == (True,)
    check(shard)
    replies = [large(job).reply for job in (first, second)]
    assert await shard.queue.replies(["r", "q"]) == replies
    ttls = {shard.server.ttl(shard.queue.keys.request(name)) for name in ("r", "q")}
    assert min(ttls) > 0
    assert len(seen) == 4
    assert max(seen) < 2000
    sizes = [(name, b"%d" % len(reply)) for name, reply in zip("rq", replies, strict=True)]
    assert shard.dump().inbox["c"] == sizes


async def test_what_is_just_small_enough_travels_with_the_call(shard: Shard) -> None:
    await shard.submit("r", body=LARGE[:LARGE_BYTES])
    assert not shard.dump().body
    assert (await shard.job()).body == LARGE[:LARGE_BYTES]


async def test_a_body_that_is_submitted_again_changes_nothing(shard: Shard) -> None:
    """The answer to the first submission may have been lost, in any phase of the request."""
    await shard.submit("r", body=LARGE)
    assert await shard.submit("r", "r", client="d", body=OTHER) == [Became.ATTACHED] * 2
    check(shard, "r")
    job = await shard.job()
    assert job.body == LARGE
    assert await shard.submit("r", body=OTHER) == [Became.ATTACHED]
    check(shard, "r")
    await shard.claim(want=0, settle=[large(job)])
    assert await shard.submit("r", body=OTHER) == [large(job).reply]
    check(shard)


async def test_nothing_is_taken_in_without_its_body(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shard.submit("known")
    before = shard.dump()
    batch = [
        submission("known", b"body"),
        submission("small", b"body"),
        submission("first", LARGE),
        submission("second", LARGE),
    ]
    batch = [structs.replace(item, environment="a", tenant="t") for item in batch]
    for kept in (0, 1):
        with monkeypatch.context() as patch:
            lose_uploads(shard, patch, first=kept)
            with pytest.raises(QueueFullError, match="no memory for large requests"):
                await shard.queue.submit("new", batch)
        assert shard.dump() == before
        assert uploads(shard) == []
    assert await shard.queue.submit("new", batch) == [
        Became.ATTACHED,
        Became.QUEUED,
        Became.QUEUED,
        Became.FULL,
    ]
    check(shard, "first")


async def test_a_call_that_is_refused_leaves_no_upload(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have filled the memory after its uploads found room."""
    made: list[str] = []

    async def refused(name: str, uploads: Mapping[str, bytes], /, **_: Any) -> Any:
        for key, data in uploads.items():
            shard.server.set(key, data, px=60_000)
            made.append(key)
        raise QueueFullError("the memory is full", 1.0)

    monkeypatch.setattr(shard.queue, "run", refused)
    with pytest.raises(QueueFullError):
        await shard.submit("r", "q", body=LARGE)
    assert len(made) == 2
    assert uploads(shard) == []


async def test_attempts_that_fail_leave_no_more_than_the_last_one(shard: Shard) -> None:
    """A client goes on trying, and each attempt brings uploads of its own."""
    broken = f"{shard.tag}:environments"
    shard.server.set(broken, "no hash")
    for _ in range(3):
        with pytest.raises(UnavailableError, match="WRONGTYPE"):
            await shard.submit("r", "q", body=LARGE)
        assert len(uploads(shard)) <= 2
    shard.server.delete(broken)
    await shard.queue.submit("c", [])
    assert uploads(shard) == []


async def test_what_is_not_taken_in_leaves_no_body(shard: Shard) -> None:
    shard.queue.settings = replace(shard.queue.settings, remember_s=60.0)
    await shard.queue.register("w", b"", {"a": b""}, {"a": "print"})
    assert await shard.submit("lost", environment="b", body=LARGE) == [Became.UNKNOWN_ENVIRONMENT]
    await shard.submit("told", body=LARGE, digest="d")
    done = structs.replace(large(await shard.job()), fingerprint="print")
    await shard.claim(want=0, settle=[done])
    assert await shard.submit("again", body=LARGE, digest="d") == [done.reply]
    assert shard.dump().verdict == {"print:d": done.reply}
    assert await shard.submit("1", "2", "3", "4", body=LARGE) == [Became.QUEUED] * 3 + [Became.FULL]
    found = shard.dump()
    found.check(remembered={"again"})
    assert [*found.body] == ["1", "2", "3"]
    assert uploads(shard) == []


@pytest.mark.parametrize("leased", [False, True])
async def test_a_withdrawn_request_leaves_no_body(shard: Shard, leased: bool) -> None:
    await shard.submit("r", body=LARGE)
    if leased:
        await shard.claim()
    assert await shard.queue.cancel(["r"]) == [True]
    check(shard)


@pytest.mark.parametrize("noticed_by", ["claim", "lookup"])
async def test_an_expired_request_leaves_no_body(shard: Shard, noticed_by: str) -> None:
    await shard.submit("r", body=LARGE, deadline_ms=1000)
    shard.advance(1001)
    if noticed_by == "claim":
        assert not (await shard.claim()).jobs
    else:
        await shard.queue.lookup("c", ["r"])
    assert (await shard.end("r") or ("",))[0] == "expired"
    check(shard)


@pytest.mark.parametrize("how", ["requeue", "retry", "defer"])
async def test_a_request_that_is_given_back_keeps_its_body(shard: Shard, how: Any) -> None:
    await shard.submit("r", body=LARGE)
    job = await shard.job()
    await shard.queue.release("w", [("r", job.token)], how=how)
    check(shard, "r")
    await shard.queue.lookup("other", ["r"])
    check(shard, "r")
    assert (await shard.job("v")).body == LARGE


async def test_a_dead_letter_has_its_body_for_itself(shard: Shard) -> None:
    await shard.quarantined("r", body=LARGE)
    job = await shard.job()
    assert job.body == LARGE
    await shard.queue.release("w", [("r", job.token)], how="retry")
    check(shard)
    # Once its reply has gone, its request id may come again.
    shard.server.delete(shard.queue.keys.request("r"))
    await shard.submit("r", body=LARGE)
    assert await shard.queue.cancel(["r"]) == [True]
    letter = await shard.queue.dead_letter("r")
    assert letter
    assert letter.submission.body == LARGE
    again = await send_again(shard.queue, letter)
    assert (await shard.job()).body == LARGE
    assert shard.dump().body == {again: LARGE}
    assert await shard.queue.dead_request_ids(9) == []
    assert await shard.queue.cancel([again]) == [True]


async def test_identical_requests_each_leave_no_body(shard: Shard) -> None:
    shard.queue.settings = replace(shard.queue.settings, remember_s=60.0)
    await shard.submit("run", body=LARGE, digest="d")
    job = await shard.job()
    await shard.submit("joined", "late", body=LARGE, digest="d", deadline_ms=1000)
    await shard.submit("last", body=LARGE, digest="d")
    check(shard, "run", "joined", "late", "last")
    assert await shard.queue.cancel(["joined"]) == [True]
    shard.advance(1001)
    done = structs.replace(large(job), fingerprint="print")
    assert (await shard.claim(want=0, settle=[done])).accepted == (True,)
    check(shard)
    assert await shard.queue.replies(["run", "last"]) == [done.reply] * 2
    assert (await shard.end("late") or ("",))[0] == "expired"
    assert shard.dump().verdict == {"print:d": done.reply}
    keys = shard.queue.keys
    assert all(60 < shard.server.ttl(keys.request(name)) <= 3600 for name in ("run", "last"))
    assert 0 < shard.server.ttl(f"{shard.tag}:verdict:print:d") <= 60


async def run_for_others(shard: Shard) -> Job:
    """A run whose own client has withdrawn it."""
    await shard.submit("run", body=LARGE, digest="d")
    job = await shard.job()
    await shard.submit("joined", body=LARGE, digest="d")
    assert await shard.queue.cancel(["run"]) == [True]
    check(shard, "run", "joined")
    return job


@pytest.mark.parametrize("remembered", [False, True])
async def test_a_withdrawn_run_that_settles_for_others(shard: Shard, remembered: bool) -> None:
    job = await run_for_others(shard)
    shard.queue.settings = replace(shard.queue.settings, remember_s=60.0)
    done = structs.replace(large(job), fingerprint="print" if remembered else "")
    assert (await shard.claim(want=0, settle=[done])).accepted == (True,)
    check(shard)
    assert await shard.queue.replies(["joined"]) == [done.reply]
    assert shard.dump().verdict == ({"print:d": done.reply} if remembered else {})


async def test_a_withdrawn_run_keeps_its_body_while_it_runs(shard: Shard) -> None:
    """Its worker may not have fetched it yet, or has to be told of it again."""
    job = await run_for_others(shard)
    ((again,), _) = await shard.queue.reconcile("w", [])
    assert (again.request_id, again.body) == ("run", LARGE)
    # Its reply has gone, and its client asks for the same once more.
    keys = shard.queue.keys
    shard.server.delete(keys.request("run"), keys.of("inbox", "c"))
    assert await shard.submit("run", body=LARGE, digest="d") == [Became.ATTACHED]
    check(shard, "run", "joined")
    assert await shard.queue.cancel(["run"]) == [True]
    assert await shard.queue.cancel(["joined"]) == [True]
    check(shard)
    assert (await shard.claim(want=0, settle=[large(job)])).accepted == (False,)
    check(shard)


async def test_a_withdrawn_run_whose_worker_dies_leaves_no_body(shard: Shard) -> None:
    await run_for_others(shard)
    await shard.lapse()
    await shard.queue.reap()
    check(shard, "joined")
    assert (await shard.job("v")).body == LARGE


@pytest.mark.parametrize("want", [1, 2], ids=["exchange", "claim"])
async def test_a_reply_that_was_not_kept_comes_with_the_call(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, want: int
) -> None:
    """What else the call did counts: a claim is not made twice."""
    await shard.submit("r", "q", body=LARGE)
    done = large(await shard.job())
    with monkeypatch.context() as patch:
        lose_uploads(shard, patch)
        claimed = await shard.claim(want=want, settle=[done])
    assert (claimed.accepted, [job.request_id for job in claimed.jobs]) == ((True,), ["q"])
    assert claimed.held == 1
    assert await shard.queue.replies(["r"]) == [done.reply]
    check(shard, "q")


async def test_a_result_counts_once_however_often_it_comes(shard: Shard) -> None:
    await shard.submit("r", body=LARGE)
    job = await shard.job()
    for _ in range(2):
        assert (await shard.claim(want=0, settle=[large(job)])).accepted == (True,)
        check(shard)
    stale = structs.replace(large(job), token="other:")
    assert (await shard.claim(want=0, settle=[stale])).accepted == (False,)
    check(shard)
    assert await shard.queue.replies(["r"]) == [large(job).reply]


async def test_a_worker_that_lost_its_lease_leaves_no_upload(shard: Shard) -> None:
    await shard.submit("r", body=LARGE)
    job = await shard.job()
    await shard.queue.release("w", [("r", job.token)])
    assert (await shard.claim(want=0, settle=[large(job)])).accepted == (False,)
    check(shard, "r")
    assert (await shard.claim("v", want=1, settle=[large(job)])).accepted == (False,)
    check(shard, "r")


@pytest.mark.parametrize("client", ["+gateway", "c"])
async def test_a_client_that_attaches_leaves_the_body_alone(shard: Shard, client: str) -> None:
    await shard.submit("r", client=client, body=LARGE)
    await shard.queue.lookup("d", ["r"])
    job = await shard.job()
    assert job.body == LARGE
    await shard.queue.lookup("e", ["r"])
    check(shard, "r")
    await shard.claim(want=0, settle=[large(job)])
    assert [request_id for request_id, _ in shard.dump().inbox["e"]] == ["r"]


# The worker


async def test_a_claim_whose_bodies_could_not_be_fetched_is_reconciled(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, driver, failures = Wire(settings), Recorder(), 2
    fetch = WorkerQueue.fetch_bodies

    async def fetch_later(queue: WorkerQueue, *args: Any) -> Any:
        nonlocal failures
        if args[0] and failures:
            failures -= 1
            raise UnavailableError("the answer was lost")
        return await fetch(queue, *args)

    monkeypatch.setattr(WorkerQueue, "fetch_bodies", fetch_later)
    async with working(settings, driver, slots=4, wire=wire), AsyncLeanQClient(settings) as lean:
        payloads = [LARGE + b"%d" % n for n in range(6)]
        assert await asyncio.wait_for(asyncio.gather(*map(lean.echo, payloads)), 30) == payloads
    assert failures == 0
    assert wire.calls["reconcile"] >= 2
    assert len(driver.started) == 6


async def test_a_body_that_the_server_has_lost_ends_its_request_alone(settings: Settings) -> None:
    queue = Queue(settings)
    batch = [submission(f"0-{n}", echo_body(LARGE)) for n in range(2)]
    await queue.submit("c", batch)
    await queue.call(lambda c: c.delete(queue.keys.of("body", "0-0")))
    async with AsyncLeanQClient(settings) as lean:
        waiting = [asyncio.create_task(lean.attach(item.request_id)) for item in batch]
        async with working(settings, slots=4):
            with pytest.raises(RequestError, match="the server has lost what was asked"):
                await asyncio.wait_for(waiting[0], 30)
            assert (await asyncio.wait_for(waiting[1], 30)).payload == LARGE
    await queue.close()


# Full memory


async def test_a_full_memory_takes_no_large_request_and_drains() -> None:
    with own_server() as server:
        queue = Queue(server.settings)
        await queue.submit("c", [submission(f"0-{n}", echo_body(LARGE)) for n in range(3)])
        (job,) = (await queue.claim("w", ["echo"], 1, busy=0, token="first:")).jobs
        server.configure("maxmemory", "1")
        with pytest.raises(QueueFullError):
            await queue.submit("c", [submission("0-late", echo_body(LARGE))])
        jobs, settled = [job], []
        # By an exchange, by a claim, and by a claim that only settles.
        for want in (1, 2, 0):
            (job,) = jobs
            reply = pack_reply(job.token, Reply(payload=OTHER))
            done = Settlement(job.request_id, job.token, "echo", reply)
            claimed = await queue.claim(
                "w", ["echo"], want, busy=0, token=f"{want}:", settlements=[done]
            )
            assert claimed.accepted == (True,)
            assert claimed.held == len(claimed.jobs) == (want > 0)
            jobs = [*claimed.jobs]
            settled.append(reply)
        server.configure("maxmemory", "0")
        assert await queue.replies([f"0-{n}" for n in range(3)]) == settled
        assert await queue.replies(["0-late"]) == [None]
        left = await queue.call(lambda c: c.keys("*:[ub][po]*:*"))
        assert left == []
        await queue.close()


async def test_uploads_that_found_room_are_removed_where_others_did_not() -> None:
    with own_server() as server:
        queue = Queue(server.settings)
        await queue.submit("c", [submission("0-warm", echo_body(b""))])
        with redis.Redis.from_url(server.settings.url) as connection:
            used = connection.info("memory")["used_memory"]
        # Some of these find room.
        server.configure("maxmemory", str(used + 1_000_000))
        with pytest.raises(QueueFullError):
            await queue.submit(
                "c", [submission(f"0-{n}", echo_body(400_000 * b"x")) for n in range(8)]
            )
        server.configure("maxmemory", "0")
        left = await queue.call(lambda c: c.keys("*:[ub][po]*:*"))
        assert left == []
        assert await queue.lookup("c", [f"0-{n}" for n in range(8)]) == [False] * 8
        await queue.close()
