"""What hostile callers, full servers and crowds do to replay memories, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter

import pytest
import redis
from click.testing import CliRunner
from support.fleets import echo_body, submission
from support.metrics import parsed, scrape
from support.queue.queues import Queue
from support.servers import Server
from support.trainers.replays import attempts, names, open_memory

from leanq.cli import cli
from leanq.errors import UsageError
from leanq.fleet.prometheus import Page, fleet_samples
from leanq.fleet.stats import fleet_stats
from leanq.queue.results import Became, MemoryRow
from leanq.queue.settings import Settings
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayBounds, ReplayEntry, pack_entry


@pytest.mark.parametrize("name", ["", "a:b", "}{", "m\n", "a b", "\0", "é", "x" * 65, "m:about"])
def test_a_name_that_would_reach_other_keys_is_refused(settings: Settings, name: str) -> None:
    with pytest.raises(UsageError, match="replay memory"):
        ReplayMemory(name, settings)


@pytest.mark.parametrize("reservoir", [False, True])
async def test_weights_that_are_no_numbers_are_never_drawn(
    settings: Settings, reservoir: bool
) -> None:
    """A caller of its own may send what this client refuses."""
    bounds = ReplayBounds(entries=4, reservoir=reservoir, weighted=True)
    async with open_memory(settings, bounds) as memory:
        queue = Queue(settings)
        for serial, weight in enumerate((math.nan, math.inf, -math.inf, -1.0, 1e300)):
            await queue.run(
                "replay_write",
                name="m",
                writer="w",
                serial=str(serial),
                writer_ms=1000,
                randoms=bytes(600),
                items=[(weight, pack_entry(attempts([weight])[0]))],
            )
        await queue.close()
        # They leave again without harm.
        for _ in range(20):
            await memory.write(attempts("abcd"))
        drawn = await memory.sample(50, weighted=True)
        assert len(drawn) == 50
        assert set(names(drawn)) <= set("abcd") | {"1e+300"}


async def test_entries_as_large_as_allowed_are_read_few_at_a_time(settings: Settings) -> None:
    async with open_memory(settings, ReplayBounds(max_mb=64)) as memory:
        large = [ReplayEntry("accepted", f"{n:03}" + "x" * 1_000_000) for n in range(20)]
        assert await memory.write(large) == 20
        with redis.Redis.from_url(settings.url) as server:
            known = server.info("commandstats")
            before = known.get("cmdstat_xrange", {"calls": 0})["calls"]
            batch = await memory.read()
            calls = server.info("commandstats")["cmdstat_xrange"]["calls"] - before
        assert [entry.text[:3] for entry in batch] == [f"{n:03}" for n in range(20)]
        assert calls >= 5


async def test_what_is_added_is_bounded_by_its_size(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_memory(settings, ReplayBounds(max_mb=256)) as memory:
        async with ReplayMemory("m", settings) as writer:
            with caplog.at_level(logging.WARNING, "leanq.replay"):
                # Nothing is written before the loop has its turn.
                for entry in [ReplayEntry("accepted", "x" * 1_000_000)] * 80:
                    writer.add(entry)
            assert 10 < writer.dropped < 20
        assert len(caplog.records) == 1
        stats = await memory.stats()
        assert (stats.written, stats.dropped) == (80 - writer.dropped, writer.dropped)


async def test_memories_give_way_before_a_request_is_refused(one: Server) -> None:
    """Writers fill a server while requests come in; each is taken, and each entry accounted for."""
    with redis.Redis.from_url(one.settings.url) as server:
        one.configure("maxmemory", str(server.info("memory")["used_memory"] + 60_000_000))
    queue, sent, ended = Queue(one.settings), 0, asyncio.Event()

    async def write(writer: ReplayMemory) -> int:
        written = 0
        for start in range(0, 800, 40):
            batch = (f"{start + n}" + "x" * 40_000 for n in range(40))
            written += await writer.write([ReplayEntry("accepted", text) for text in batch])
        return written

    async def request() -> None:
        nonlocal sent
        while not ended.is_set():
            body = submission(f"0-{sent}", echo_body(b"x" * 1000))
            assert await queue.submit("c", [body]) == [Became.QUEUED]
            sent += 1

    bounds = ReplayBounds(max_mb=1000)
    memories = [ReplayMemory("m", one.settings, bounds=bounds) for _ in range(4)]
    requesting = asyncio.create_task(request())
    written = await asyncio.gather(*map(write, memories))
    ended.set()
    await requesting
    stats = await memories[0].stats()
    dropped = sum(each.dropped for each in memories)
    assert dropped > 0
    assert sent > 0
    assert sum(written) + dropped == 4 * 800
    # And as many of the older ones again as had to leave for them.
    assert stats.written == sum(written)
    assert dropped < stats.dropped <= 3 * dropped
    assert stats.dropped == dropped + stats.evicted
    assert stats.entries == stats.written - stats.evicted
    for each in memories:
        await each.close()
    await queue.close()


async def test_a_crowd_that_writes_reads_and_drops_leaves_a_memory_in_order(
    settings: Settings,
) -> None:
    bounds = ReplayBounds(entries=50, weighted=True)
    async with open_memory(settings, bounds) as memory:
        ended = asyncio.Event()

        async def write(name: int) -> None:
            async with ReplayMemory("m", settings, bounds=bounds) as writer:
                for n in range(40):
                    assert await writer.write(attempts([f"{name} {n}"] * 7, 1 + n)) == 7

        async def learn() -> None:
            async with ReplayMemory("m", settings, bounds=bounds) as learner:
                offset = 0
                while not ended.is_set():
                    batch = await learner.read(offset, limit=30)
                    assert batch.offset >= offset
                    assert sorted(set(batch.numbers)) == list(batch.numbers)
                    offset = batch.offset
                    await learner.sample(9, weighted=True)

        learning = [asyncio.create_task(learn()) for _ in range(3)]
        writing = asyncio.gather(*map(write, range(5)))
        for _ in range(4):
            await memory.drop()
            await memory.open()
        await writing
        ended.set()
        await asyncio.gather(*learning)
        stats, batch = await memory.stats(), await memory.read()
        assert stats.entries == len(batch) == stats.written - stats.evicted <= 50
        there = Counter(names(batch))
        assert set(names(await memory.sample(300, weighted=True))) <= set(there)
        tag = f"{{{settings.prefix}:0}}:replay:m"
        with redis.Redis.from_url(settings.url) as server:
            members = server.hkeys(f"{tag}:places")
        assert sorted(map(int, members)) == sorted(batch.numbers)


# What is said of memories


async def test_a_look_shows_what_memories_hold_and_let_go(settings: Settings) -> None:
    bounds = ReplayBounds(entries=3)
    async with open_memory(settings, bounds) as memory:
        await memory.write(attempts("abcd"))
        queue = Queue(settings)
        await queue.run("replay_refuse", name="m", refused=5, evict=0)
        await queue.close()
        stats = await memory.stats()
        seen = await fleet_stats(settings)
        assert seen.status.memories == {"m": MemoryRow(3, stats.size_bytes, 4, 1, 5)}
        with Page(0, lambda: list(fleet_samples(seen))) as page:
            found = parsed(scrape(page.port)[1])
        assert found['leanq_replay_dropped_total{memory="m"}'] == 5
        assert found['leanq_replay_entries{memory="m"}'] == 3
        command = ["status", "--url", settings.url]
        environ = {"LEANQ_PREFIX": settings.prefix}
        done = await asyncio.to_thread(CliRunner().invoke, cli, [*command, "--json"], env=environ)
        assert json.loads(done.stdout)["memories"]["m"]["dropped"] == 5
        done = await asyncio.to_thread(CliRunner().invoke, cli, command, env=environ)
        assert "m: 3 entries in 0.0 MB, 1 evicted, 5 dropped" in done.output
    assert (await fleet_stats(settings)).status.memories == {}


async def test_a_look_survives_whatever_stands_in_a_memorys_place(settings: Settings) -> None:
    tag = f"{{{settings.prefix}:0}}:replay"
    places = (f"{tag}:names", f"{tag}:text:about", f"{tag}:odd:about", f"{tag}:1:about")
    with redis.Redis.from_url(settings.url) as server:
        try:
            server.zadd(places[0], {f"{n}": n for n in range(300)})
            server.zadd(places[0], {"gone": 301, "text": 302, "odd": 303, b"\xff\n": 304})
            server.set(places[1], "no hash")
            server.hset(places[2], mapping={"last": "x", "evicted": "9" * 400, "bytes": "-1"})
            server.hset(places[3], mapping={"last": "1"})
            # Of more than a hundred, the latest are looked at.
            memories = (await fleet_stats(settings)).status.memories
            assert memories == {"odd": MemoryRow(0, 0, 0, 0, 0)}
        finally:
            server.delete(*places)
