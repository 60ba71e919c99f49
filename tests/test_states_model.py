"""States and snapshots against a model, on a real server that may lose what it is free to lose."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.queue.counted import check_counts
from support.queue.shards import with_test_clock
from support.queue.stores import HOUR_MS, HOURS, ROOT, child, collect_all, digest, early, open_store

import leanq.queue.shard
import leanq.states
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings
from leanq.states import Packed

_T = TypeVar("_T")

BUDGET = 1 << 20
COMING_MS = 600_000
# Four of them fit into the largest snapshot, and not all snapshots into the budget.
POOL = [bytes([n]) * 60_000 for n in range(8)]
numbers = st.integers(0, 11)
keys = st.sampled_from([f"k{n}" for n in range(8)])
places = st.integers(0, len(POOL) - 1)


@dataclass
class Row:
    """A snapshot as it stands in the accounts; ``used`` in milliseconds."""

    used: int
    packed: Packed


class Machine(RuleBasedStateMachine):
    """What must be kept and found. The chunks of snapshots are few, so that many share some."""

    server: EmbeddedServer

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        settings = replace(Settings(self.server.url), state_ttl_s=HOURS * 3600.0, snapshot_mb=1)
        self.stack = contextlib.AsyncExitStack()
        self.store = self.run(self.stack.enter_async_context(open_store(settings)))
        self.states = self.store.states
        self.records: dict[str, tuple[int, bytes]] = {}
        self.rows: dict[str, Row] = {}
        self.manifests: set[str] = set()
        self.chunks: set[bytes] = set()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()

    def use(self, state: str, record: bytes) -> None:
        self.records[state] = (self.store.now_ms // HOUR_MS, record)

    # The parent of each state has half its number.
    @rule(number=numbers)
    def keep(self, number: int) -> None:
        parent = early(number // 2)
        record = child(parent) if number else ROOT
        self.run(self.states.keep({early(number): record}))
        self.use(early(number), record)
        if parent in self.records:
            self.use(parent, self.records[parent][1])

    @rule(number=numbers)
    def recall(self, number: int) -> None:
        line = [number]
        while line[-1]:
            line.append(line[-1] // 2)
        found: list[bytes] = []
        for state in map(early, line):
            if state not in self.records:
                break
            found.append(self.records[state][1])
            self.use(state, found[-1])
        expected = found if len(found) == len(line) else None
        assert self.run(self.states.recall(early(number))) == expected

    @rule(hours=st.integers(1, 40))
    def wait(self, hours: int) -> None:
        self.store.advance(hours * HOUR_MS)

    @rule()
    def collect(self) -> None:
        self.store.advance(HOUR_MS)
        self.run(collect_all(self.states))
        oldest = self.store.now_ms // HOUR_MS - HOURS
        self.records = {s: kept for s, kept in self.records.items() if kept[0] >= oldest}
        self.drop(self.gone())

    @rule(key=keys, chosen=st.lists(places, min_size=3, max_size=5))
    def keep_snapshot(self, key: str, chosen: Sequence[int]) -> None:
        self.store.advance(1)
        chunks = [POOL[place] for place in chosen]
        snapshot = Packed(key.encode(), tuple(chunks))
        kept = self.run(self.states.keep_snapshot(key, snapshot))
        if snapshot.size_bytes > BUDGET // 4:
            assert not kept
        elif self.is_whole(key):
            assert kept
            self.rows[key].used = self.store.now_ms
        elif key in self.rows and key not in self.gone() and key not in self.manifests:
            # As if another worker was just bringing it.
            assert not kept
        else:
            assert kept
            self.drop([key, *self.gone()])
            for oldest in sorted(self.rows, key=lambda name: self.rows[name].used):
                if self.total() + snapshot.size_bytes > BUDGET:
                    self.drop([oldest])
            self.rows[key] = Row(self.store.now_ms, snapshot)
            self.manifests.add(key)
            self.chunks |= set(chunks)

    @rule(key=keys)
    def find_snapshot(self, key: str) -> None:
        self.store.advance(1)
        found = self.run(self.states.find_snapshot(key))
        if self.is_whole(key):
            assert found == self.rows[key].packed
            self.rows[key].used = self.store.now_ms
        else:
            assert found is None
            if key in self.manifests:
                self.drop([key, *self.gone()])

    @rule(key=keys)
    def drop_snapshot(self, key: str) -> None:
        self.run(self.states.drop_snapshot(key))
        self.drop([key, *self.gone()])

    @rule(key=keys)
    def evict_manifest(self, key: str) -> None:
        self.store.evict("snap", key)
        self.manifests.discard(key)

    @rule(place=places)
    def evict_chunk(self, place: int) -> None:
        chunk = POOL[place]
        self.store.evict("chunk", digest(chunk))
        self.chunks.discard(chunk)

    @rule(place=places)
    def damage_chunk(self, place: int) -> None:
        chunk = POOL[place]
        for name in self.store.server.scan_iter(f"*:chunk:{digest(chunk)}", count=1000):
            self.store.server.setrange(name, 7, b"!")
            # Found at the next look at any snapshot that has it.
            for key, row in list(self.rows.items()):
                if chunk in row.packed.chunks and self.is_whole(key):
                    assert self.run(self.states.find_snapshot(key)) is None
                    self.drop([key, *self.gone()])
            self.store.evict("chunk", digest(chunk))
            self.chunks.discard(chunk)

    def is_whole(self, key: str) -> bool:
        return key in self.manifests and set(self.rows[key].packed.chunks) <= self.chunks

    def gone(self) -> list[str]:
        """What the server has evicted, and no client may be bringing."""
        late = self.store.now_ms - COMING_MS
        return [k for k, row in self.rows.items() if k not in self.manifests and row.used <= late]

    def total(self) -> int:
        return sum(row.packed.size_bytes for row in self.rows.values())

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            row = self.rows.pop(name, None)
            self.manifests.discard(name)
            others = [each.packed.chunks for each in self.rows.values()]
            used = set[bytes]().union(*others)
            self.chunks -= set(row.packed.chunks if row else ()) - used

    @invariant()
    def server_holds_what_the_model_does(self) -> None:
        assert self.total() <= BUDGET
        check_counts(self.store.server, self.store.settings.prefix)
        assert self.store.accounts() == set(self.rows)
        assert self.store.keys("snap") == self.manifests
        assert self.store.keys("chunk") == {digest(chunk) for chunk in self.chunks}
        held = Counter(self.store.keys("states"))
        assert set(held) == {state[:3] for state in self.records}


@pytest.mark.slow
def test_store_does_as_the_model(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leanq.queue.shard, "script_text", with_test_clock)
    monkeypatch.setattr(leanq.states, "BUCKETS", 2)
    Machine.server = server
    run_state_machine_as_test(
        Machine, settings=profile(max_examples=60, stateful_step_count=50, deadline=None)
    )
