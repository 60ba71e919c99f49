"""What becomes of a queue after a minute, an hour, a day and a hundred days, by its server's clock.

The scripts' clock is set; keys that end have their times-to-live from the server.
"""

from __future__ import annotations

import math
import re
import struct

import pytest
from msgspec import structs
from support.queue.shards import Shard, lasting_of, settlement

from leanq.queue.requests import Reply
from leanq.queue.results import Settlement, Use
from leanq.queue.shard import new_token
from leanq.queue.wire import pack_reply
from leanq.states import BUCKETS

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
CPU_MS = 10**12
"""What one result took, so that a hundred days add up to more digits than Lua shows by itself."""


async def circle(shard: Shard, name: str, cpu_ms: int = 1000) -> None:
    """A worker, two tenants and five requests do all that a fleet does in a day."""
    queue, tag = shard.queue, shard.tag
    await queue.register("w", b"", {"a": b""}, {"a": "fingerprint"})
    for tenant in ("t", f"tenant-{name}"):
        ids = [f"{name}-{tenant}-{n}" for n in range(4)]
        await shard.submit(*ids, tenant=tenant, affinity=("x",), digest="")
        (job,) = (await shard.claim("w", 1)).jobs
        # One after another, as `exchange` does it.
        for _ in range(2):
            done = structs.replace(settlement(job, warm=True), cpu_ms=cpu_ms)
            (job,) = (await shard.claim("w", 1, settle=[done])).jobs
        await queue.release("w", [(job.request_id, job.token)], how="retry")
        await queue.cancel([ids[3]])
        (job,) = (await shard.claim("w", 9)).jobs
        reply = pack_reply(job.token, Reply("accepted"))
        await shard.claim(
            "w", 0, settle=[Settlement(job.request_id, job.token, "accepted", reply, cpu_ms=cpu_ms)]
        )
        counted = {"cpu_ms": cpu_ms, "attempts": 4}
        used = {Use("a", tenant, name, what): n for what, n in counted.items()}
        assert (await queue.renew("w", ["a"], used=used)).known
        # Replies and their notes end by themselves.
        for request_id in ids:
            left_ms = shard.server.pttl(queue.keys.request(request_id))
            assert 0 < left_ms <= shard.settings.reply_ttl_s * 1000
        assert 0 < shard.server.pttl(f"{tag}:inbox:c") <= shard.settings.reply_ttl_s * 1000
    await queue.reap()
    await queue.status()
    shard.dump().check()


def whole(shard: Shard) -> dict[str, int]:
    """The counters, each of them a whole number as all servers write and read it."""
    found = shard.server.hgetall(f"{shard.tag}:stats")
    texts = {name.decode(): value.decode() for name, value in found.items() if name}
    odd = {name: text for name, text in texts.items() if not re.fullmatch(r"0|-?[1-9]\d*", text)}
    assert not odd
    return {name: int(text) for name, text in texts.items()}


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 20])
async def test_a_worker_that_is_left_for_26_hours_loses_no_heartbeat(
    shard: Shard, step: int
) -> None:
    begun_minute = shard.now_ms // MINUTE_MS
    await circle(shard, "first")
    for minute in range(0, 26 * 60, step):
        shard.advance(step * MINUTE_MS)
        # What counts is each minute's first.
        assert (await shard.queue.renew("w", ["a"])).known
        if minute == 60:
            await circle(shard, "later")
    minutes = [each["minute"] for each in await shard.queue.minutes(0)]
    assert minutes == [*range(begun_minute, begun_minute + 26 * 60 + 1, step)][-1500:]
    # Who used no CPU time for a day makes room for others.
    assert not [name for name in whole(shard) if name.startswith("u:")]
    assert whole(shard)["tenants"] == 0
    await circle(shard, "next")
    assert whole(shard)["tenants"] == 2
    assert whole(shard)["settled"] == 18


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["turns", "weights"])
async def test_after_a_minute_an_hour_a_day_and_a_hundred_days_all_goes_on(
    shard: Shard, weighted: bool
) -> None:
    if weighted:
        await shard.queue.set_weight("t", 0.3)
    first_day = shard.now_ms // DAY_MS
    steps = (MINUTE_MS, HOUR_MS, DAY_MS, *[DAY_MS] * 100, 100 * DAY_MS)
    for number, step_ms in enumerate(steps):
        await circle(shard, f"n{number}", CPU_MS)
        shard.advance(step_ms)
    await circle(shard, "last", CPU_MS)
    counted, rounds = whole(shard), len(steps) + 1
    assert counted["settled"] == 6 * rounds
    assert counted["u_ms:a"] == 6 * rounds * CPU_MS
    # No more tenants are counted by name than within two days.
    assert counted["tenants"] == sum(name.startswith("u:") for name in counted) <= 5
    accounts = await shard.queue.accounts(0)
    assert len(accounts) == 100
    assert max(accounts) == shard.now_ms // DAY_MS
    assert min(accounts) > first_day
    _, uses = accounts[max(accounts)]
    assert uses[Use("a", "t", "last", "cpu_ms")] == CPU_MS
    assert len(await shard.queue.minutes(0)) == len(steps) + 1
    if weighted:
        key = f"{shard.tag}:shares:a:1"
        assert 0 < shard.server.pttl(key) <= DAY_MS
        for text in shard.server.hvals(key):
            assert all(math.isfinite(float(part)) for part in text.split() if part != b"-")


@pytest.mark.slow
async def test_states_that_nobody_uses_are_collected_and_others_stay(shard: Shard) -> None:
    queue, hours = shard.queue, 24 * 7
    used, unused = (bytes([0, 0, *[n] * 30]) for n in (1, 2))

    async def collect() -> int:
        removed = 0
        for _ in range(2 * BUCKETS):
            done = await queue.run(
                "state_collect", unused_hours=hours, buckets=BUCKETS, max_records=9
            )
            removed += done["removed"]
            if done["ended"]:
                break
        return removed

    records = [("000", state[1:], b"record") for state in (used, unused)]
    await queue.run("state_keep", records=records)
    for _ in range(7):
        shard.advance(DAY_MS)
        found = await queue.run("state_recall", id=used, shards=1, max_records=9)
        assert found == [b"record"]
    assert await collect() == 0
    shard.advance(2 * HOUR_MS)
    assert await collect() == 1
    assert shard.server.hkeys(f"{lasting_of(shard.tag)}:states:000") == [used[1:]]
    (kept,) = shard.server.hvals(f"{lasting_of(shard.tag)}:states:000")
    assert struct.unpack(">I", kept[:4])[0] == (shard.now_ms - 2 * HOUR_MS) // HOUR_MS
    shard.advance(100 * DAY_MS)
    assert await collect() == 1


@pytest.mark.slow
async def test_a_snapshot_and_a_memory_outlast_days(shard: Shard) -> None:
    queue = shard.queue
    week_ms = 7 * DAY_MS

    async def room(key: str) -> list[int] | None:
        missing: list[int] | None = await queue.run(
            "snapshot_room", key=key, bytes=5, budget=10, max_snapshots=9, coming_ms=60_000,
            chunks=[f"{key}-chunk"],
        )  # fmt: skip
        return missing

    for number in range(4):
        key = f"s{number}"
        assert await room(key) == [1]
        shard.server.set(f"{shard.tag}:chunk:{key}-chunk", b"chunk", px=60_000)
        kept = await queue.run(
            "snapshot_keep", key=key, manifest=b"m", ttl_ms=week_ms, chunks=[f"{key}-chunk"]
        )
        assert kept == 1
        shard.advance(DAY_MS)
        assert await queue.run("snapshot_find", key=key, ttl_ms=week_ms)
        assert week_ms - HOUR_MS < shard.server.pttl(f"{shard.tag}:snap:{key}") <= week_ms
    # The budget has room for two.
    assert sorted(shard.server.hkeys(f"{shard.tag}:snaps")) == [b"s2", b"s3"]

    memory = {"name": "m"}
    bounds = {"entries": 3, "max_bytes": 1000, "reservoir": 0, "weighted": 1}
    last = int((await queue.run("replay_open", **memory, **bounds))["base"])
    for number in range(100):
        shard.advance(DAY_MS)
        written = await queue.run(
            "replay_write", **memory, writer=new_token(), serial="1", writer_ms=1000,
            randoms=bytes(60), items=[(float(number), b"entry")],
        )  # fmt: skip
        # Numbers count up by one, however late.
        assert int(written) == last + 1
        last = int(written)
    found = await queue.run(
        "replay_sample", **memory, count=9, max_bytes=10**9, by_weight=True, randoms=bytes(600)
    )
    assert {int(each) for each in found[::2]} <= {last - 2, last - 1, last}
    await queue.run("replay_drop", **memory)
