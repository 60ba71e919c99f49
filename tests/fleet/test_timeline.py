"""Where a request's time went: attempt by attempt, and all of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from msgspec import structs
from support.queue.shards import LARGE, Shard, settlement
from support.terminals import Terminal

from leanq.client import LeanQClient
from leanq.fleet.timeline import LOST, Timeline, find, of_reply
from leanq.queue.requests import Reply, Spent
from leanq.queue.results import Job, Settlement
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply, unpack_reply
from leanq.queue.worker_queue import reap

KEPT_MS = 3_600_000
LATER_MS = 10**12
# It takes some seconds, beside which the way from the client and back is short.
SLOW = """set_option maxRecDepth 1000000

def count : Nat → Nat → Nat
  | 0, a => a + 1
  | n + 1, a => count n (count n a)

theorem t : count 14 0 = 16384 := by decide
"""
QUICK = SLOW.replace("14 0 = 16384", "2 0 = 4")


@pytest.fixture
def late(shard: Shard) -> Shard:
    """A queue whose clock shows a time of this millennium, as times in replies do."""
    shard.advance(LATER_MS)
    return shard


def measured(job: Job, payload: bytes | None = None) -> Settlement:
    """The end of a job that was held for 2 ms and ran for 40: 10 to fork, 12 to judge."""
    spent = Spent(KEPT_MS, job.claimed_ms, 2000, 10_000, True, job.lost)
    reply = Reply("accepted", worker="w", wall_s=0.04, audit_s=0.012, spent=spent, payload=payload)
    reply = structs.replace(reply, submitted_ms=job.submitted_ms)
    return structs.replace(settlement(job), reply=pack_reply(job.token, reply))


async def ended(shard: Shard, request_id: str, settled_ms: int) -> Timeline:
    """The timeline of a request whose reply was written then."""
    (data,) = await shard.queue.replies([request_id])
    assert data is not None
    found = of_reply(unpack_reply(request_id, data), settled_ms)
    assert found is not None
    return found


def phases(found: Timeline) -> list[dict[str, float]]:
    return [
        {name: round(ms, 3) for name, ms in attempt.phases_ms.items()} for attempt in found.attempts
    ]


# Attempts


async def test_each_attempt_has_its_part_and_the_last_is_told_by_its_worker(late: Shard) -> None:
    await late.submit("r")
    late.advance(5)
    job = await late.job("first")
    late.advance(100)
    await late.queue.release("first", [("r", job.token)], how="retry")
    late.advance(7)
    await late.job("second")
    await late.lapse()
    await reap(late.queue)
    late.advance(3)
    job = await late.job("third")
    late.advance(50)
    await late.claim("third", 0, settle=[measured(job)])
    found = await ended(late, "r", late.now_ms)
    lease_ms = late.now_ms - int(found.submitted_s * 1000) - 5 - 100 - 7 - 3 - 50
    assert phases(found) == [
        {"waited": 5, "lost": 100},
        {"waited": 7, "lost": lease_ms},
        {"waited": 3, "claimed": 2, "forked": 10, "elaborated": 18, "judged": 12, "settled": 8},
    ]
    ends = [(attempt.worker, attempt.end) for attempt in found.attempts]
    assert ends == [("first", LOST["retry"]), ("second", LOST["reaped"]), ("w", "accepted")]
    assert found.total_ms == late.now_ms - found.submitted_s * 1000


async def test_what_has_not_ended_is_told_so_far(late: Shard) -> None:
    assert await find(late.queue, "r") is None
    await late.submit("r")
    found = await find(late.queue, "r")
    assert found
    assert list(found.attempts[0].phases_ms) == ["waits"]
    late.advance(5)
    await late.job("w")
    found = await find(late.queue, "r")
    assert found
    assert found.attempts[0].worker == "w"
    assert found.attempts[0].phases_ms["waited"] == 5
    # The test's clock stands, and that of the server goes on.
    assert list(found.attempts[0].phases_ms) == ["waited", "runs"]
    assert found.end == found.attempts[0].end == ""


async def test_very_many_attempts_leave_room_for_the_record(late: Shard) -> None:
    await late.submit("r")
    for number in range(50):
        job = await late.job("w" * 60 + f"{number:04}")
        late.advance(1)
        await late.queue.release(job.token, [])
        await late.queue.release("w" * 60 + f"{number:04}", [("r", job.token)])
    job = await late.job()
    assert 0 < len(job.lost) <= 360
    late.advance(50)
    await late.claim("w", 0, settle=[measured(job)])
    found = await ended(late, "r", late.now_ms)
    assert len(found.attempts) >= 3
    assert found.total_ms == 100


# Shared runs


@pytest.mark.parametrize("payload", [None, LARGE])
async def test_one_that_joined_has_its_own_time(late: Shard, payload: bytes | None) -> None:
    await late.submit("leader", digest="same")
    job = await late.job()
    late.advance(20)
    await late.submit("joined", digest="same")
    late.advance(25)
    await late.claim("w", 0, settle=[measured(job, payload)])
    leader = await ended(late, "leader", late.now_ms)
    assert leader.total_ms == 45
    joined = await ended(late, "joined", late.now_ms)
    # Its time begins in the middle of the elaboration.
    assert phases(joined) == [
        {"waited": 0, "claimed": 0, "forked": 0, "elaborated": 10, "judged": 12, "settled": 3}
    ]


async def test_a_remembered_verdict_took_no_time(late: Shard) -> None:
    late.queue.settings = replace(late.settings, remember_s=60.0)
    await late.queue.register("w", b"", {"a": b""}, {"a": "fp"})
    await late.submit("first", digest="same")
    job = await late.job()
    late.advance(50)
    await late.claim("w", 0, settle=[structs.replace(measured(job), fingerprint="fp")])
    late.advance(1000)
    (data,) = await late.submit("again", digest="same")
    assert isinstance(data, bytes)
    found = await ended(late, "again", late.now_ms)
    assert (found.total_ms, found.attempts[0].end) == (0, "accepted, remembered")


# Ends without a worker's word


async def test_what_is_withdrawn_waited_or_ran(late: Shard) -> None:
    await late.submit("runs", "waits")
    assert (await late.job()).request_id == "runs"
    late.advance(30)
    await late.queue.cancel(["waits", "runs"])
    ends = [phases(await ended(late, request_id, late.now_ms)) for request_id in ("runs", "waits")]
    assert ends == [[{"waited or ran": 30}], [{"waited": 30}]]


async def test_a_dead_letter_has_its_attempts(late: Shard) -> None:
    await late.submit("r")
    while not await late.end("r"):
        job = await late.job()
        late.advance(10)
        await late.queue.release("w", [("r", job.token)], how="retry")
    found = await ended(late, "r", late.now_ms)
    assert found.end == "poisoned"
    assert phases(found)[-1] == {"waited": 0, "lost": 10}
    assert found.total_ms == 10 * late.settings.max_attempts


async def test_a_reply_without_times_tells_nothing(late: Shard) -> None:
    await late.submit("r")
    await late.settle(await late.job())
    assert await find(late.queue, "r") is None


# On a fleet


@pytest.mark.slow
def test_the_sum_is_the_latency_that_the_client_saw(client: Terminal, fleet: Settings) -> None:
    with LeanQClient(fleet) as lean:
        lean.check(QUICK).result(60)
        began_s = time.monotonic()
        future = lean.check(SLOW)
        reply = future.result(120)
        saw_ms = 1000 * (time.monotonic() - began_s)
    done = client.run("trace", future.request_id, "--json")
    found = json.loads(done.out)
    assert found["end"] == reply.verdict == "accepted"
    (attempt,) = found["attempts"]
    assert attempt["worker"] == reply.worker
    assert {"waited", "claimed", "elaborated", "judged", "settled"} < set(attempt["phases_ms"])
    assert sum(attempt["phases_ms"].values()) == pytest.approx(found["total_ms"], abs=0.01)
    assert found["total_ms"] == pytest.approx(saw_ms, rel=0.02)
    shown = client.run("trace", future.request_id).out
    assert shown.splitlines()[0].endswith(": accepted")
    assert shown.splitlines()[-1].startswith("in all")


def test_an_id_that_nobody_knows(client: Terminal) -> None:
    done = client.run("trace", "0-nobody")
    assert (done.code, done.out) == (2, "")
    assert "nothing is known of the time of 0-nobody" in done.err


def test_an_id_with_the_number_of_no_shard(client: Terminal) -> None:
    done = client.run("trace", "9" * 5000 + "-a")
    assert (done.code, done.out) == (2, "")
    assert "is no request id; one looks like" in done.err
