"""Loose pinning on a real server: who is warm, and preferences among what waits."""

from __future__ import annotations

from support.queue.shards import Shard

from leanq.queue.results import Claimed

STATE = ("state", "header")


def request_ids(claimed: Claimed) -> list[str]:
    return [job.request_id for job in claimed.jobs]


async def test_a_worker_settles_ends_and_is_remembered_among_a_thousand(shard: Shard) -> None:
    others = {f"other{number}": shard.now_ms + 1 for number in range(998)}
    await shard.warm("first", "state")
    shard.server.zadd(f"{shard.tag}:warm:a:state", others)
    shard.advance(2)
    for worker in ("second", "third"):
        await shard.warm(worker, "state")
    assert set(shard.dump().warm["a:state"]) == {*others, "second", "third"}
    assert shard.server.pttl(f"{shard.tag}:warm:a:state") > 0


async def test_one_that_is_not_warm_is_not_noted(shard: Shard) -> None:
    await shard.submit("r", affinity=("state",))
    await shard.settle(await shard.job())
    assert not shard.dump().warm


async def test_a_dead_letter_keeps_its_affinities(shard: Shard) -> None:
    await shard.quarantined("r", affinity=STATE)
    job = await shard.job()
    await shard.queue.release("w", [("r", job.token)], how="retry")
    letter = await shard.queue.dead_letter("r")
    assert letter
    assert letter.submission.affinity == STATE


# Preferences among what waits


async def test_the_warmest_of_the_next_ones_goes_first(shard: Shard) -> None:
    await shard.warm("w", "state", "header")
    await shard.submit("cold1", "cold2")
    await shard.submit("header", affinity=("new", "header"))
    await shard.submit("state", affinity=("state", "header"))
    claimed = [request_ids(await shard.claim("w", 1)) for _ in range(4)]
    assert claimed == [["state"], ["header"], ["cold1"], ["cold2"]]


async def test_several_are_chosen_at_once(shard: Shard) -> None:
    await shard.warm("w", "state")
    for number in range(4):
        await shard.submit(f"cold{number}")
        await shard.submit(f"warm{number}", affinity=("state",))
    assert request_ids(await shard.claim("w", 5)) == ["warm0", "warm1", "warm2", "warm3", "cold0"]
    assert request_ids(await shard.claim("other", 5)) == ["cold1", "cold2", "cold3"]


async def test_only_the_front_of_a_line_is_searched(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit(*(f"cold{number}" for number in range(16)))
    await shard.submit("warm", affinity=("state",))
    claimed = [request_ids(await shard.claim("w", 1)) for _ in range(3)]
    assert claimed == [["cold0"], ["warm"], ["cold1"]]


async def test_nothing_is_passed_over_for_long(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("cold", *(f"w{number}" for number in range(8)), affinity=("other",))
    for number in range(3):
        await shard.submit(f"warm{number}", affinity=("state",))
    # Its long wait alone is no reason, or in a long line no worker would ever be preferred.
    shard.advance(60_000)
    assert request_ids(await shard.claim("w", 1)) == ["warm0"]
    shard.advance(1999)
    assert request_ids(await shard.claim("w", 1)) == ["warm1"]
    shard.advance(1)
    assert request_ids(await shard.claim("w", 1)) == ["cold"]


async def test_what_was_withdrawn_and_sent_again_runs_once(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("q", "r")
    await shard.queue.cancel(["r"])
    shard.server.delete(shard.queue.keys.request("r"))  # as at the end of its time-to-live
    await shard.submit("r")
    assert shard.dump().lists["wait"] == {"a:1:t": ["q", "r", "r"]}
    assert sorted(request_ids(await shard.claim("w", 9))) == ["q", "r"]
    assert not shard.dump().lists["wait"]


async def test_environments_without_affinities_are_not_searched(shard: Shard) -> None:
    await shard.warm("w", "state", environment="b")
    await shard.submit("r1", "r2", "r3")
    await shard.claim("other", 9)
    assert shard.dump().affine == {"b"}


async def test_an_idle_worker_waits_for_no_warm_one(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r1", "r2", affinity=("state",))
    assert shard.wakeup() == 2
    assert request_ids(await shard.claim("other", 1)) == ["r1"]
    assert request_ids(await shard.claim("w", 1)) == ["r2"]
    counters = (await shard.queue.status()).counters
    assert (counters["warm_hits"], counters["warm_misses"]) == (1, 2)
