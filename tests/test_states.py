"""States and snapshots on a real server: kept, recalled, collected, evicted, and in trouble."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.queue.queues import Queue
from support.queue.shards import with_test_clock
from support.queue.stores import (
    HOUR_MS,
    HOURS,
    ROOT,
    Store,
    child,
    collect_all,
    digest,
    early,
    ident,
    open_store,
    packed,
)
from support.waiting import eventually

import leanq.queue.shard
import leanq.states
from leanq.errors import QueueFullError, UnavailableError
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings
from leanq.states import MemoryStates, Packed, RedisStates, States


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leanq.queue.shard, "script_text", with_test_clock)


@pytest.fixture
def small(settings: Settings) -> Settings:
    return replace(settings, state_ttl_s=HOURS * 3600.0, snapshot_mb=1)


@pytest.fixture
async def store(small: Settings) -> AsyncIterator[Store]:
    async with open_store(small) as made:
        yield made


@pytest.fixture(params=["memory", "one shard", "three shards"])
async def states(request: pytest.FixtureRequest, small: Settings) -> AsyncIterator[States]:
    if request.param == "memory":
        yield MemoryStates()
    else:
        async with open_store(replace(small, shards=3 if "three" in request.param else 1)) as made:
            yield made.states


# Records


async def test_state_is_recalled_with_all_that_leads_to_it(states: States) -> None:
    ids = [ident(n) for n in range(40)]
    steps = {mine: child(parent, mine.encode()) for parent, mine in pairwise(ids)}
    records = {ids[0]: ROOT, **steps}
    await states.keep(records)
    await states.keep(records)
    expected = [records[state] for state in reversed(ids)]
    assert await states.recall(ids[-1]) == expected
    assert await states.recall(ids[20]) == expected[19:]
    assert await states.recall(ids[0]) == [ROOT]
    assert await states.recall(ident("unknown")) is None
    assert states.counts["broken"] == 0


async def test_state_without_its_parent_is_unknown(states: States) -> None:
    await states.keep({ident(1): child(ident(0))})
    assert await states.recall(ident(1)) is None
    assert states.counts["broken"] == 1
    await states.keep({ident(0): ROOT})
    assert await states.recall(ident(1)) == [child(ident(0)), ROOT]


@pytest.mark.slow
async def test_circle_ends(states: States) -> None:
    await states.keep({ident(n): child(ident((n + 1) % 3)) for n in range(3)})
    assert await states.recall(ident(0)) is None
    assert states.counts["broken"] == 1


@pytest.mark.parametrize("record", [b"", b"X" + bytes(40), b"S" + bytes(31)])
async def test_what_is_no_record_is_neither_kept_nor_recalled(
    store: Store, states: States, record: bytes
) -> None:
    with pytest.raises(ValueError, match="no record"):
        await states.keep({ident(0): record})
    assert await states.recall(ident(0)) is None
    state = ident(1)
    bucket = f"{store.queues[0].keys.lasting}:states:{state[:3]}"
    store.server.hset(bucket, mapping={bytes.fromhex(state)[1:]: bytes(4) + record})
    assert await store.states.recall(state) is None
    assert store.states.counts["broken"] == 1


async def test_more_records_than_one_call_takes(store: Store) -> None:
    await store.states.keep({ident(n): child(ident("root")) for n in range(2500)})
    await store.states.keep({ident("root"): ROOT})
    for n in (0, 999, 1000, 2499):
        assert await store.states.recall(ident(n)) == [child(ident("root")), ROOT]


async def test_no_record_has_a_time_to_live(store: Store) -> None:
    await store.states.keep({ident(0): ROOT})
    assert store.server.ttl(f"{store.queues[0].keys.lasting}:states:{ident(0)[:3]}") == -1


async def test_use_is_written_once_an_hour(store: Store) -> None:
    await store.states.keep({ident(0): ROOT})
    before = store.server.info("commandstats")["cmdstat_hset"]["calls"]
    store.advance(HOUR_MS)
    for _ in range(5):
        assert await store.states.recall(ident(0)) == [ROOT]
    assert store.server.info("commandstats")["cmdstat_hset"]["calls"] == before + 1


# Collection


@pytest.fixture
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leanq.states, "BUCKETS", 2)


@pytest.mark.usefixtures("few_buckets")
async def test_unused_states_are_collected_and_ancestors_of_used_ones_kept(store: Store) -> None:
    states = store.states
    records = {early(0): ROOT, early(1): child(early(0)), early(2): child(early(0)), early(3): ROOT}
    await states.keep(records)
    store.advance(HOURS * HOUR_MS)
    assert await states.recall(early(1))
    assert await collect_all(states) == 0
    store.advance(HOUR_MS)
    assert await collect_all(states) == 2
    assert await states.recall(early(1)) == [child(early(0)), ROOT]
    assert await states.recall(early(2)) is None


@pytest.mark.usefixtures("few_buckets")
async def test_a_new_child_uses_its_parent(store: Store) -> None:
    await store.states.keep({early(0): ROOT})
    store.advance(HOURS * HOUR_MS)
    await store.states.keep({early(1): child(early(0))})
    store.advance(HOURS * HOUR_MS)
    assert await collect_all(store.states) == 0
    assert await store.states.recall(early(1)) == [child(early(0)), ROOT]


@pytest.mark.usefixtures("few_buckets")
async def test_collection_goes_in_small_pieces_and_rests_after_a_round(store: Store) -> None:
    states, many = store.states, 2000
    await states.keep({early(2 * n): ROOT for n in range(many)})
    store.advance((HOURS + 1) * HOUR_MS)
    removed = [await states.collect()]
    # HSCAN gives roughly as many as it is asked for.
    while sum(removed) < many and removed[-1]:
        removed.append(await states.collect())
    assert sum(removed) == many
    assert max(removed) < 3 * leanq.states.LOOKED_AT_AT_ONCE
    place = f"{store.queues[0].keys.lasting}:collect"
    while not store.server.hexists(place, "ended"):
        assert await states.collect() == 0
    bucket = f"{store.queues[0].keys.lasting}:states:000"
    store.server.hset(bucket, mapping={bytes.fromhex(early(0))[1:]: bytes(4) + ROOT})
    store.advance(HOUR_MS - 1)
    assert await collect_all(states) == 0
    store.advance(1)
    assert await collect_all(states) == 1


# Snapshots


async def test_snapshot_comes_back_as_it_was(store: Store) -> None:
    snapshot = packed(b"a" * 100_000, b"b" * 1000)
    assert await store.states.find_snapshot("k") is None
    assert await store.states.keep_snapshot("k", snapshot)
    assert await store.states.keep_snapshot("k", packed(b"other"))
    assert await store.states.find_snapshot("k") == snapshot
    own = f"{{{store.settings.prefix}:*}}"
    kinds = ("chunk", "snap")
    names = [key for kind in kinds for key in store.server.scan_iter(f"{own}:{kind}:*")]
    assert len(names) == 3
    assert all(0 < store.server.ttl(name) <= HOURS * 3600 for name in names)
    await store.states.drop_snapshot("k")
    assert (store.keys("chunk"), store.keys("snap"), store.accounts()) == (set(), set(), set())
    assert store.states.counts == {"found": 1, "missing": 1, "refused": 0}


async def test_chunk_that_is_there_is_not_sent_again(store: Store) -> None:
    assert await store.states.keep_snapshot("k", packed(b"shared", b"own"))
    before = store.server.info("commandstats")["cmdstat_set"]["calls"]
    assert await store.states.keep_snapshot("l", packed(b"shared", manifest=b"second"))
    # The manifest.
    assert store.server.info("commandstats")["cmdstat_set"]["calls"] == before + 1
    await store.states.drop_snapshot("k")
    assert await store.states.find_snapshot("l") == packed(b"shared", manifest=b"second")
    assert store.keys("chunk") == {digest(b"shared")}


async def test_least_recently_used_makes_room(store: Store) -> None:
    contents = {f"k{n}": packed(b"%d" % n * 250_000) for n in range(5)}
    for key in ("k0", "k1", "k2", "k3"):
        assert await store.states.keep_snapshot(key, contents[key])
        store.advance(1)
    assert await store.states.find_snapshot("k0") == contents["k0"]
    store.advance(1)
    assert await store.states.keep_snapshot("k4", contents["k4"])
    assert store.accounts() == {"k0", "k2", "k3", "k4"}
    assert len(store.keys("chunk")) == 4
    # What they share is counted for each, and stays for the last.
    shared = packed(b"0" * 250_000, manifest=b"shared")
    assert await store.states.keep_snapshot("k5", shared)
    assert store.accounts() == {"k0", "k3", "k4", "k5"}
    await store.states.drop_snapshot("k0")
    assert await store.states.find_snapshot("k5") == shared


async def test_successor_keeps_the_chunks_that_it_shares(store: Store) -> None:
    assert await store.states.keep_snapshot("k", packed(b"shared", b"own"))
    store.evict("chunk", digest(b"own"))
    assert await store.states.keep_snapshot("k", packed(b"shared", b"other"))
    assert await store.states.find_snapshot("k") == packed(b"shared", b"other")
    assert store.keys("chunk") == {digest(b"shared"), digest(b"other")}


async def test_number_of_snapshots_is_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leanq.states, "_MOST_SNAPSHOTS", 3)
    for n in range(5):
        assert await store.states.keep_snapshot(f"k{n}", packed(b"%d" % n))
        store.advance(1)
    assert store.accounts() == {"k2", "k3", "k4"}


async def test_who_lost_its_place_makes_nothing_visible(store: Store) -> None:
    (queue,) = store.queues
    mine, other = digest(b"mine"), digest(b"other")
    for chunk in (b"mine", b"other"):
        store.server.set(f"{queue.keys.tag}:chunk:{digest(chunk)}", chunk)
    room = {"key": "k", "bytes": 100, "budget": 1 << 20, "max_snapshots": 10}

    async def make_room(chunk: str) -> Any:
        return await queue.run("snapshot_room", **room, coming_ms=600_000, chunks=[chunk])

    async def keep(chunk: str) -> Any:
        return await queue.run("snapshot_keep", key="k", manifest=b"m", ttl_ms=1000, chunks=[chunk])

    assert await make_room(mine) == []
    assert await make_room(other) is None
    store.advance(600_000)
    assert await make_room(other) == []
    assert await keep(mine) == 0
    assert await keep(other) == 1


@pytest.mark.parametrize("harm", ["changed", "shortened", "evicted", "no account"])
async def test_damaged_snapshot_is_dropped(store: Store, harm: str) -> None:
    tag = store.queues[0].keys.tag
    assert await store.states.keep_snapshot("k", packed(b"first", b"second"))
    name = f"{tag}:chunk:{digest(b'second')}"
    if harm == "evicted":
        store.server.delete(name)
    elif harm == "no account":
        store.server.delete(f"{tag}:snaps")
    else:
        store.server.set(name, {"changed": b"sEcond", "shortened": b"sec"}[harm])
    assert await store.states.find_snapshot("k") is None
    fault = "damaged" if harm in ("changed", "shortened") else "missing"
    assert store.states.counts[fault] == 1
    assert (store.keys("snap"), store.accounts()) == (set(), set())
    store.evict("chunk", digest(b"second"))
    assert await store.states.keep_snapshot("k", packed(b"first", b"second"))
    assert await store.states.find_snapshot("k")


async def test_too_large_a_snapshot_is_refused(store: Store) -> None:
    most = store.states.most_snapshot_bytes
    assert most == 1 << 18
    assert not await store.states.keep_snapshot("k", Packed(b"m", (bytes(most),)))
    assert store.states.counts["refused"] == 1
    assert not store.keys("chunk")
    assert await store.states.keep_snapshot("k", Packed(b"m", (bytes(most - 1),)))


async def test_many_workers_bring_the_same_snapshot(store: Store, small: Settings) -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            RedisStates(await stack.enter_async_context(Queue.every(small))) for _ in range(4)
        ]
        sent = [packed(b"%d" % n * 1000, b"%d" % n * 2000) for n in range(4)]
        pairs = zip(workers, sent, strict=True)
        kept = await asyncio.gather(*(each.keep_snapshot("k", data) for each, data in pairs))
    assert any(kept)
    assert await store.states.find_snapshot("k") in sent
    # Nothing was left behind that no account knows.
    assert len(store.keys("chunk")) == 2


async def test_snapshot_whose_worker_died_on_the_way_makes_room(store: Store) -> None:
    async with Queue.every(store.settings) as queues:
        dying = RedisStates(queues)
        bringing = asyncio.create_task(dying.keep_snapshot("k", packed(b"a", b"b" * 200_000)))
        await eventually(lambda: bool(store.accounts()))
        bringing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            # It may have been quicker than we; then it is as if its manifest had been evicted.
            await bringing
    store.evict("snap", "k")
    assert await store.states.find_snapshot("k") is None
    assert not await store.states.keep_snapshot("k", packed(b"a"))
    store.advance(600_000)
    assert await store.states.keep_snapshot("k", packed(b"a"))
    assert store.keys("chunk") == {digest(b"a")}
    assert await store.states.find_snapshot("k") == packed(b"a")


async def test_what_the_server_has_evicted_leaves_the_accounts(store: Store) -> None:
    (queue,) = store.queues
    for key in ("k0", "k1"):
        assert await store.states.keep_snapshot(key, packed(key.encode() * 500))
        store.advance(600_000)
    store.evict("snap", "k0")
    assert await store.states.keep_snapshot("k2", packed(b"new" * 500))
    assert store.accounts() == {"k1", "k2"}
    assert store.keys("chunk") == {digest(b"k1" * 500), digest(b"new" * 500)}
    tallies = (await queue.status()).tallies
    assert tallies["snapshots_evicted"] == 1
    assert tallies["snapshot_bytes"] == sum(
        packed(content * 500).size_bytes for content in (b"k1", b"new")
    )


@pytest.mark.usefixtures("few_buckets")
async def test_accounts_of_expired_snapshots_end_with_a_round(store: Store) -> None:
    assert await store.states.keep_snapshot("k", packed(b"a"))
    store.evict("snap", "k")
    store.advance(600_000)
    await collect_all(store.states)
    assert (store.accounts(), store.keys("chunk")) == (set(), set())


# A server in trouble


@pytest.fixture
async def own(small: Settings) -> AsyncIterator[Store]:
    """On a server that no other test needs."""
    with EmbeddedServer() as server:
        async with open_store(replace(small, url=server.url)) as made:
            yield made


async def test_full_memory_refuses_what_adds_and_loses_no_state(own: Store) -> None:
    states = own.states
    await states.keep({ident(0): ROOT, ident(1): child(ident(0))})
    assert await states.keep_snapshot("k", packed(b"a"))
    own.advance(2 * HOUR_MS)
    own.server.config_set("maxmemory", "1mb")
    with pytest.raises(QueueFullError):
        await states.keep({ident(2): child(ident(0))})
    assert not await states.keep_snapshot("l", packed(b"b" * 100_000))
    assert own.accounts() == {"k"}
    assert await states.recall(ident(1)) == [child(ident(0)), ROOT]
    assert await states.find_snapshot("k") == packed(b"a")
    assert await states.collect() == 0
    await states.drop_snapshot("k")
    own.server.config_set("maxmemory", "0")
    await states.keep({ident(2): child(ident(0))})
    assert await states.keep_snapshot("l", packed(b"b" * 100_000))


@pytest.mark.slow
async def test_eviction_takes_snapshots_and_no_state(own: Store) -> None:
    await own.states.keep({ident(n): child(ident("root"), bytes(500)) for n in range(2000)})
    await own.states.keep({ident("root"): ROOT})
    for n in range(4):
        assert await own.states.keep_snapshot(f"k{n}", packed(b"%d" % n * 200_000))
    own.server.config_set("maxmemory-policy", "volatile-lru")
    used = own.server.info("memory")["used_memory"]
    own.server.config_set("maxmemory", used - 500_000)
    with contextlib.suppress(QueueFullError):
        await own.states.keep({ident("root"): ROOT})
    assert len(own.keys("chunk")) < 4
    found = [await own.states.find_snapshot(f"k{n}") for n in range(4)]
    assert None in found
    for n in range(2000):
        assert await own.states.recall(ident(n))


async def test_server_out_of_reach_is_named(small: Settings) -> None:
    with EmbeddedServer() as server:
        async with Queue.every(replace(small, url=server.url)) as queues:
            states = RedisStates(queues)
            await queues[0].ping()
            server.close()
            for call in (states.recall(ident(0)), states.find_snapshot("k"), states.collect()):
                with pytest.raises(UnavailableError):
                    await call
            with pytest.raises(UnavailableError):
                await states.keep_snapshot("k", packed(b"a"))
