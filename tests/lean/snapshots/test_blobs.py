"""Snapshots in an object store: a real S3 (moto's server), and one that fails and forgets."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace

import obstore
import pytest
import redis
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from obstore.store import from_url
from support.s3 import serving_s3
from support.stores import Store, digest, open_store, packed

from leanq.errors import UsageError
from leanq.lean.snapshots import blobs as blobs_module
from leanq.lean.snapshots.blobs import ObjectStore, open_blobs
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings
from leanq.states import CHUNK_BYTES, Packed, RedisStates

LARGE = packed(b"large" * 60_000, b"rest")
MIB = 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with serving_s3() as url:
        yield url


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    """Snapshots of 250 KiB and more are large, and no four of them fit."""
    async with open_store(replace(settings, snapshot_mb=1)) as made:
        yield made


@dataclass
class Shelf:
    """An object store in this process, which can be away."""

    chunks: dict[str, bytes] = field(default_factory=dict)
    away: bool = False

    async def put(self, digest: str, chunk: bytes) -> None:
        if self.away:
            raise ConnectionError("away")
        self.chunks[digest] = chunk

    async def get(self, digest: str) -> bytes | None:
        if self.away:
            raise ConnectionError("away")
        return self.chunks.get(digest)


def with_blobs(store: Store, blobs: Shelf | ObjectStore) -> RedisStates:
    return RedisStates(store.queues, blobs)


async def test_a_large_snapshot_goes_to_s3_and_comes_back(store: Store, s3: str) -> None:
    states = with_blobs(store, ObjectStore(s3))
    assert await states.keep_snapshot("k", LARGE)
    assert not store.keys("chunk")
    assert await ObjectStore(s3).get(digest(LARGE.chunks[1])) == b"rest"
    assert await states.find_snapshot("k") == LARGE
    assert await states.keep_snapshot("small", packed(b"small"))
    assert len(store.keys("chunk")) == 1


async def test_what_would_be_dropped_moves_to_s3(store: Store, s3: str) -> None:
    states = with_blobs(store, ObjectStore(s3))
    kept = {f"k{n}": packed(bytes([n]) * 240_000, b"shared") for n in range(9)}
    for key, snapshot in kept.items():
        assert await states.keep_snapshot(key, snapshot)
    assert len(store.keys("chunk")) <= 5
    for key, snapshot in kept.items():
        assert await states.find_snapshot(key) == snapshot
    (status,) = [await queue.status() for queue in store.queues]
    assert status.tallies["snapshots_moved"] == 5
    assert status.tallies["snapshot_bytes"] <= MIB


@pytest.mark.parametrize("harm", ["lost", "other bytes", "too large"])
async def test_what_s3_lost_or_damaged_is_dropped(store: Store, s3: str, harm: str) -> None:
    blobs = ObjectStore(s3)
    states = with_blobs(store, blobs)
    assert await states.keep_snapshot("k", LARGE)
    first = digest(LARGE.chunks[0])
    if harm == "lost":
        await obstore.delete_async(
            from_url(s3, client_options={"allow_http": True}), f"chunk/{first}"
        )
    else:
        await blobs.put(first, b"evil" if harm == "other bytes" else bytes(CHUNK_BYTES + 1))
    assert await states.find_snapshot("k") is None
    assert states.counts["missing" if harm == "lost" else "damaged"] == 1
    assert not store.keys("snap")
    assert await states.keep_snapshot("k", LARGE)
    assert await states.find_snapshot("k") == LARGE


async def test_a_store_that_is_away_costs_the_snapshot_and_nothing_else(
    store: Store, s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = with_blobs(store, ObjectStore(s3))
    assert await kept.keep_snapshot("k", LARGE)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        away = with_blobs(store, ObjectStore(s3))
    with caplog.at_level(logging.WARNING):
        assert await away.find_snapshot("k") is None
        assert not await away.keep_snapshot("l", LARGE)
        assert await away.find_snapshot("k") is None
    # Once for all of them: it is left alone for a while.
    assert len([r for r in caplog.records if "does not answer" in r.message]) == 1
    assert await kept.find_snapshot("k") == LARGE
    assert await with_blobs(store, ObjectStore(s3)).find_snapshot("l") is None


async def test_a_worker_without_the_store_leaves_the_pointer_to_others(store: Store) -> None:
    shelf = Shelf()
    assert await with_blobs(store, shelf).keep_snapshot("k", LARGE)
    assert await RedisStates(store.queues).find_snapshot("k") is None
    assert await with_blobs(store, shelf).find_snapshot("k") == LARGE


async def test_without_a_store_nothing_moves(store: Store) -> None:
    states = RedisStates(store.queues)
    assert not await states.keep_snapshot("k", LARGE)
    for n in range(9):
        assert await states.keep_snapshot(f"k{n}", packed(bytes([n]) * 240_000))
    assert await states.find_snapshot("k0") is None


actions = st.one_of(
    st.tuples(st.just("keep"), st.integers(0, 4), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("find"), st.integers(0, 4)),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("damage"), st.integers(0, 5)),
    st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 4)),
    st.tuples(st.just("away"), st.booleans()),
)


@pytest.mark.slow
@profile(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(actions, max_size=40))
def test_what_is_found_is_what_was_kept(server: EmbeddedServer, todo: list[tuple]) -> None:  # type: ignore[type-arg]
    """Whatever the store and Redis lose, damage or refuse; the accounts stay within the budget."""
    asyncio.run(_keep_and_find(server, todo))


async def _keep_and_find(server: EmbeddedServer, todo: list[tuple]) -> None:  # type: ignore[type-arg]
    pieces = [bytes([n]) * 200_000 for n in range(6)]
    settings = replace(Settings(server.url), prefix="blobs", snapshot_mb=1)
    async with open_store(settings) as store:
        shelf, kept = Shelf(), dict[str, Packed]()
        states = with_blobs(store, shelf)
        for what, number, *more in todo:
            key, piece = f"k{number}", pieces[number]
            if what == "keep":
                chunks = (pieces[more[0]], pieces[number]) if more[1] else (pieces[more[0]],)
                before = await states.find_snapshot(key)
                snapshot = Packed(b"manifest", chunks)
                if await states.keep_snapshot(key, snapshot):
                    kept[key] = before or snapshot
            elif what == "find":
                assert await states.find_snapshot(key) in (None, kept.get(key))
            elif what == "lose":
                shelf.chunks.pop(digest(piece), None)
            elif what == "damage":
                shelf.chunks.update(
                    {digest(piece): b"evil"} if digest(piece) in shelf.chunks else {}
                )
            elif what == "evict":
                store.evict("chunk", digest(piece))
            elif what == "drop":
                await states.drop_snapshot(key)
            else:
                shelf.away = bool(number)
            (status,) = [await queue.status() for queue in store.queues]
            assert 0 <= status.tallies.get("snapshot_bytes", 0) <= MIB
        shelf.away = False
        for key in store.accounts():
            assert await states.find_snapshot(key) in (None, kept.get(key))
        # No chunk stays in Redis that no snapshot has.
        for key in store.accounts():
            await states.drop_snapshot(key)
        assert not store.keys("chunk")
    with redis.Redis.from_url(server.url) as connection:
        assert not list(connection.scan_iter("{blobs:*"))


@pytest.mark.parametrize(
    "url", ["bucket", "http://bucket/x", "s3://", "s3:///x", "s3://a b", "s3://ab/x"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match="LEANQ_BLOBS must be s3://BUCKET/PREFIX"):
        Settings("unix:///-", blobs=url)


def test_nothing_is_opened_unless_it_is_named() -> None:
    assert open_blobs(Settings("unix:///-")) is None


def test_obstore_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(blobs_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'leanq\[blobs\]'"):
        open_blobs(Settings("unix:///-", blobs="s3://bucket"))
