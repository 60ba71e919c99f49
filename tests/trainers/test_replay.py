"""Replay memories on a real server: the three ways of reading, bounds, and trouble."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from support.queue.queues import Queue
from support.servers import Server
from support.trainers.replays import attempts, learner, names, open_memory
from support.waiting import eventually

from leanq.errors import (
    InvalidRequestError,
    TooLargeError,
    UnavailableError,
    UsageError,
    WireError,
)
from leanq.queue.settings import Settings
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayBounds, ReplayEntry, ReplayValue, pack_entry


@pytest.fixture
async def memory(settings: Settings) -> AsyncIterator[ReplayMemory]:
    async with open_memory(settings, ReplayBounds(entries=10, weighted=True)) as made:
        yield made


# A list


async def test_a_learner_waits_for_what_is_not_written_yet(memory: ReplayMemory) -> None:
    waiting = asyncio.create_task(memory.read(wait_s=60))
    await asyncio.sleep(0)
    await memory.write(attempts("a"))
    assert names(await waiting) == ["a"]
    assert len(await memory.read((await memory.stats()).last, wait_s=0.01)) == 0


async def test_more_entries_than_one_call_takes(settings: Settings) -> None:
    async with open_memory(settings) as memory:
        await memory.write(attempts(range(700)))
        assert names(await memory.read(limit=650)) == [str(n) for n in range(650)]
        large = [ReplayEntry("rejected", "x" * 400_000) for _ in range(5)]
        assert await memory.write(large) == 5
        assert len(await memory.read((await memory.stats()).last - 5)) == 5


async def test_many_writers_and_learners_see_one_order(settings: Settings) -> None:
    async def write(writer: int) -> None:
        async with ReplayMemory("m", settings) as mine:
            for batch in range(10):
                await mine.write(attempts(f"{writer}:{batch}:{n}" for n in range(7)))

    async def learn() -> list[str]:
        async with ReplayMemory("m", settings) as mine:
            found: list[str] = []
            offset = 0
            async with asyncio.timeout(60):
                while len(found) < 4 * 10 * 7:
                    batch = await mine.read(offset, limit=50, wait_s=10)
                    offset, found = batch.offset, found + names(batch)
            return found

    async with open_memory(settings):
        *_, one, other = await asyncio.gather(*map(write, range(4)), learn(), learn())
    assert one == other
    assert len(set(one)) == len(one)
    for writer in range(4):
        mine = [text for text in one if text.startswith(f"{writer}:")]
        assert mine == [f"{writer}:{batch}:{n}" for batch in range(10) for n in range(7)]


@pytest.mark.slow
async def test_a_learner_that_is_killed_and_comes_back_misses_no_entry(
    settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "learned"
    rng = random.Random(22)

    def learned() -> int:
        return path.read_text().count("\n") if path.exists() else 0

    async with open_memory(settings) as memory:
        written = 0
        for _ in range(5):
            with learner(settings, path):
                until = learned() + rng.randrange(30)
                for _ in range(40):
                    await memory.write(attempts(range(written, written + 25)))
                    written += 25
                await eventually(lambda: learned() > until)  # noqa: B023
        with learner(settings, path):
            await eventually(lambda: _texts(path)[-1:] == [str(written - 1)])
        assert _texts(path) == [str(n) for n in range(written)]


def _texts(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
    assert not any(line["missed"] for line in lines)
    return [text for line in lines for text in line["texts"]]


# A subscription


async def test_a_subscriber_gets_what_is_written_from_now_on(one: Server) -> None:
    async with ReplayMemory("m", one.settings) as memory:
        await memory.write(attempts("ab"))
        batches = memory.subscribe(limit=3)
        first = asyncio.ensure_future(anext(batches))
        with redis.Redis.from_url(one.settings.url) as server:
            # It has begun once it waits; nothing else does on this server.
            await eventually(lambda: server.info("clients")["blocked_clients"] > 0)
        await memory.write(attempts("c"))
        assert names(await first) == ["c"]
        await memory.write(attempts("defgh"))
        late = await anext(batches)
        assert (names(late), late.missed) == (["f", "g", "h"], 2)
        await batches.aclose()


# Samples


async def test_weights_of_many_sizes_are_drawn_by_their_share(settings: Settings) -> None:
    weights = [0.0, 1e-9, 0.3, 0.5, 1.0, 1.0, 1.5, 2.0, 7.0, 1000.0]
    async with open_memory(settings, ReplayBounds(weighted=True)) as memory:
        await memory.write(attempts(["never"], 0.0))
        assert len(await memory.sample(3, weighted=True)) == 0
        # The largest leaves again.
        for name, weight in enumerate(weights):
            await memory.write(attempts([name], weight))
        rng = random.Random(22)
        drawn = Counter(names(await memory.sample(20_000, weighted=True, rng=rng)))
    assert "0" not in drawn
    share = 20_000 / sum(weights)
    likely = [n for n, weight in enumerate(weights) if weight * share > 5]
    counts = [drawn[str(n)] for n in likely]
    assert chi_squared(counts, [weights[n] * share for n in likely]) < bound(len(likely))


@pytest.mark.parametrize("reservoir", [False, True])
async def test_each_of_many_with_one_weight_is_drawn_alike(
    settings: Settings, reservoir: bool
) -> None:
    bounds = ReplayBounds(entries=40, weighted=True, reservoir=reservoir)
    async with open_memory(settings, bounds) as memory:
        # The least of its class, so that a draw is given up the most often; and those before it
        # have left the class from its beginning, its middle or its end.
        await memory.write(attempts(range(60), 1.0))
        for weighted in (True, False):
            rng = random.Random(3)
            drawn = Counter(names(await memory.sample(4000, weighted=weighted, rng=rng)))
            assert len(drawn) == 40
            assert chi_squared([*drawn.values()], [100.0] * 40) < bound(40)


async def test_a_memory_without_weights_says_how_to_have_them(settings: Settings) -> None:
    async with open_memory(settings) as memory:
        with pytest.raises(UsageError, match=r"ReplayBounds\(weighted=True\)"):
            await memory.sample(1, weighted=True)


def chi_squared(counts: Sequence[int], expected: Sequence[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


def bound(cells: int) -> float:
    """What chi-squared over so many cells passes once in a million times (Wilson and Hilferty)."""
    free = cells - 1
    return free * (1 - 2 / (9 * free) + 4.753 * math.sqrt(2 / (9 * free))) ** 3


@pytest.mark.slow
async def test_a_reservoir_has_each_entry_with_the_same_probability(
    settings: Settings, queue: Queue
) -> None:
    """500 reservoirs of 20 entries out of 200; the randomness of each write is seeded."""
    rng = random.Random(22)
    kept: Counter[int] = Counter()
    rounds, written, room = 500, 200, 20
    items = [(1.0, pack_entry(entry)) for entry in attempts(range(written))]
    with redis.Redis.from_url(settings.url) as server:
        for _ in range(rounds):
            async with open_memory(settings, ReplayBounds(entries=room, reservoir=True)) as memory:
                await queue.run(
                    "replay_write",
                    name=memory.name,
                    writer="w",
                    serial=str(rng.random()),
                    writer_ms=1000,
                    randoms=rng.randbytes(6 * written),
                    items=items,
                )
                first = (await memory.stats()).last - written + 1
                slots = server.hvals(queue.keys.of("replay", "m", "slots"))
                kept.update(int(slot.partition(b" ")[0]) - first for slot in slots)  # type: ignore[union-attr]
    assert kept.total() == rounds * room
    # By places of ten, since an entry is kept or not and no more.
    groups = [sum(kept[n] for n in range(start, start + 10)) for start in range(0, written, 10)]
    assert chi_squared(groups, [rounds * room / len(groups)] * len(groups)) < bound(len(groups))


# Bounds


async def test_who_comes_later_may_leave_the_bounds_out_or_name_the_same(
    settings: Settings,
) -> None:
    bounds = ReplayBounds(entries=7, max_mb=3, reservoir=True)
    async with open_memory(settings, bounds):
        async with ReplayMemory("m", settings) as other:
            assert await other.open() == bounds
        async with ReplayMemory("m", settings, bounds=bounds) as other:
            assert await other.open() == bounds
        with pytest.raises(UsageError, match=r"has ReplayBounds\(entries=7.*drop it first"):
            async with ReplayMemory("m", settings, bounds=ReplayBounds(entries=8)):
                pass


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"entries": 0}, "entries must lie between 1 and 100000000, got 0"),
        ({"max_mb": 0}, "max_mb must lie between 1 and"),
        ({"entries": "5"}, "entries must be an integer"),
        ({"reservoir": 1}, "reservoir must be True or False"),
    ],
)
def test_bounds_out_of_range_are_refused(fields: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        ReplayBounds(**fields)  # type: ignore[arg-type]


async def test_arguments_out_of_range_are_refused(memory: ReplayMemory) -> None:
    with pytest.raises(InvalidRequestError, match="offset must be at least 0, got -1"):
        await memory.read(-1)
    with pytest.raises(InvalidRequestError, match="limit must be at least 1, got 0"):
        await memory.read(limit=0)
    with pytest.raises(InvalidRequestError, match="n must be at least 0, got -3"):
        await memory.sample(-3)
    with pytest.raises(UsageError, match="the replay memory 'a:b' is not a valid name"):
        ReplayMemory("a:b", "redis://127.0.0.1:1")
    with pytest.raises(UsageError, match="in the Redis itself"):
        ReplayMemory("m", "https://gateway.example")


async def test_a_memory_that_was_dropped_is_made_anew_and_its_numbers_go_on(
    settings: Settings,
) -> None:
    bounds = ReplayBounds(entries=10)
    async with open_memory(settings, bounds) as memory, open_memory(settings, bounds) as other:
        await memory.write(attempts("ab"))
        before = await memory.read()
        await other.drop()
        assert len(await memory.read(before.offset)) == 0
        assert len(await memory.sample(3)) == 0
        await memory.write(attempts("cd"))
        after = await memory.read(before.offset)
        assert (names(after), after.missed) == (["c", "d"], 0)


async def test_a_learner_ahead_of_the_memory_reads_on_where_it_ends(
    memory: ReplayMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that failed over may have lost its last writes."""
    await memory.write(attempts("ab"))
    ahead = (await memory.stats()).last + 100
    batch = await memory.read(ahead)
    assert (len(batch), batch.offset) == (0, (await memory.stats()).last)
    assert "the server has lost its last entries" in caplog.text
    await memory.write(attempts("c"))
    assert names(await memory.read(batch.offset)) == ["c"]


# Trouble


async def test_entries_of_a_later_release_are_passed_over_and_counted(
    memory: ReplayMemory, queue: Queue
) -> None:
    later = pack_entry(ReplayEntry("accepted", "x")).replace(b"\xa1v\x01", b"\xa1v\x02")
    await memory.write(attempts("a"))
    await queue.run(
        "replay_write",
        name=memory.name,
        writer="later",
        serial="1",
        writer_ms=1000,
        randoms=b"",
        items=[(1.0, later), (1.0, b"\xc1")],
    )
    await memory.write(attempts("b"))
    batch = await memory.read()
    assert (names(batch), batch.unreadable, batch.missed) == (["a", "b"], 2, 0)
    assert batch.offset == (await memory.stats()).last


async def test_what_is_added_is_written_in_the_background_and_before_the_end(
    settings: Settings,
) -> None:
    async with open_memory(settings) as memory:
        async with ReplayMemory("m", settings) as writer:
            for entry in attempts(range(600)):
                writer.add(entry)
            with pytest.raises(InvalidRequestError):
                writer.add(ReplayEntry("accepted", 5))  # type: ignore[arg-type]
        assert names(await memory.read()) == [str(n) for n in range(600)]


async def test_what_is_added_beyond_the_buffer_is_dropped_and_counted(settings: Settings) -> None:
    async with open_memory(settings) as memory:
        async with ReplayMemory("m", settings) as writer:
            # Nothing is written before the loop has its turn.
            for entry in attempts(range(10_003)):
                writer.add(entry)
            assert writer.dropped == 3
        assert (await memory.stats()).written == 10_000


async def test_a_server_out_of_reach_is_waited_for(one: Server, tmp_path: Path) -> None:
    async with ReplayMemory("m", one.settings) as memory:
        await memory.write(attempts("a"))
        offset = (await memory.read()).offset
        one.stop()
        reading = asyncio.create_task(memory.read(offset, wait_s=60))
        writing = asyncio.create_task(memory.write(attempts("b")))
        one.start()
        # The server has lost all that it knew.
        assert await writing == 1
        assert names(await reading) == ["b"]


async def test_a_server_out_of_reach_for_too_long_is_an_error(one: Server) -> None:
    memory = ReplayMemory("m", one.settings, unavailable_timeout_s=0.0)
    await memory.open()
    one.stop()
    with pytest.raises(UnavailableError):
        await memory.write(attempts("a"))
    with pytest.raises(UnavailableError):
        await memory.read()
    memory.add(attempts("a")[0])
    await memory.close()
    assert memory.dropped == 1


async def test_a_full_server_drops_entries_and_takes_requests(one: Server) -> None:
    """Requests are refused at maxmemory, so entries leave before, and are counted."""
    async with ReplayMemory("m", one.settings) as memory:
        large = [ReplayEntry("accepted", f"{n}" + "x" * 10_000) for n in range(400)]
        assert await memory.write(large) == 400
        with redis.Redis.from_url(one.settings.url) as server:
            used = server.info("memory")["used_memory"]
            one.configure("maxmemory", str(used - 1_000_000))
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                server.set("request", "x")
            # A second writer finds the server full; as it writes on, room is made.
            async with ReplayMemory("m", one.settings) as writer:
                for start in range(0, 400, 50):
                    assert await writer.write(large[start : start + 50]) == 0
                assert writer.dropped == 400
            server.set("request", "x")
            stats = await memory.stats()
            assert (stats.entries, stats.dropped) == (0, 800)
            one.configure("maxmemory", "0")
            async with ReplayMemory("m", one.settings) as writer:
                assert await writer.write(large[:3]) == 3


async def test_memories_lie_in_one_shard_each(settings: Settings) -> None:
    many = replace(settings, shards=3)
    async with open_memory(many) as memory:
        await memory.write(attempts("ab"))
        with redis.Redis.from_url(settings.url) as server:
            found = {
                key.partition(b"}")[0]
                for key in server.scan_iter(f"{{{settings.prefix}:*:replay:m:*")
            }
        assert len(found) == 1
        assert names(await memory.read()) == ["a", "b"]


# The value beside it


async def test_a_value_is_published_and_seen_with_its_version(memory: ReplayMemory) -> None:
    assert await memory.published() is None
    fields = {"policy": "step-1", "temperature": 0.7, "kinds": ["a", {"b": None}], "on": True}
    version = await memory.publish(fields)
    assert await memory.published() == ReplayValue(version or 0, fields)


async def test_one_of_many_who_replace_the_same_value_does(
    memory: ReplayMemory, settings: Settings
) -> None:
    async with ReplayMemory("m", settings) as other:
        both = [(memory, 1), (other, 2)]
        for expected in (0, None):
            seen = await memory.published()
            versions = await asyncio.gather(
                *(
                    mine.publish({"by": by}, expected=seen.version if seen else expected)
                    for mine, by in both
                )
            )
            assert sum(version is None for version in versions) == 1
            now = await memory.published()
            assert now
            assert now.version in versions
            assert now.version > (seen.version if seen else 0)
        assert await other.publish({"by": 3})


async def test_who_watches_sees_the_latest_value_and_each_change(one: Server) -> None:
    async with open_memory(one.settings) as memory, ReplayMemory("m", one.settings) as other:
        await memory.publish({"n": 0})
        watching = other.watch()
        assert (await anext(watching)).fields == {"n": 0}
        changed = asyncio.ensure_future(anext(watching))
        # A learner can read and write in the meantime, and the memory may be made anew.
        await other.write(attempts("a"))
        assert names(await other.read()) == ["a"]
        await memory.drop()
        version = await memory.publish({"n": 1})
        assert await changed == ReplayValue(version or 0, {"n": 1})
        await watching.aclose()
        with redis.Redis.from_url(one.settings.url) as server:
            # Nothing else waits on this server.
            await eventually(lambda: server.info("clients")["blocked_clients"] == 0)


async def test_a_watcher_passes_over_what_it_cannot_read(
    memory: ReplayMemory, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.run("replay_publish", name=memory.name, expected="", value=b"\xc1")
    with pytest.raises(WireError, match="not a value beside a replay memory"):
        await memory.published()
    watching = memory.watch()
    changed = asyncio.ensure_future(anext(watching))
    await eventually(lambda: "not a value beside a replay memory" in caplog.text)
    await memory.publish({"n": 1})
    assert (await changed).fields == {"n": 1}
    await watching.aclose()


async def test_a_watcher_outlives_a_server_that_forgets_all(one: Server) -> None:
    async with ReplayMemory("m", one.settings) as memory:
        await memory.publish({"n": 0})
        watching = memory.watch()
        await anext(watching)
        changed = asyncio.ensure_future(anext(watching))
        one.stop()
        one.start()
        await memory.publish({"n": 1})
        assert (await changed).fields == {"n": 1}
        await watching.aclose()


@pytest.mark.parametrize(
    "fields", [5, {"f": object()}, {"f": 1 << 70}, {3: "x"}, {"\ud800": "x"}, [("a",)]]
)
async def test_what_is_no_value_is_refused(memory: ReplayMemory, fields: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a value to be published"):
        await memory.publish(fields)


async def test_a_value_that_is_too_large_is_refused(memory: ReplayMemory) -> None:
    with pytest.raises(TooLargeError, match="more than the 65536 that are allowed"):
        await memory.publish({"x": "x" * 65536})
    with pytest.raises(InvalidRequestError, match="expected must be at least 0, got -1"):
        await memory.publish({}, expected=-1)


async def test_a_value_is_published_at_full_memory(one: Server) -> None:
    async with ReplayMemory("m", one.settings) as memory:
        one.configure("maxmemory", "100000")
        assert await memory.publish({"policy": "p"})
