"""Replay memories against a model: whatever is written, refused, read and drawn."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.queue.counted import check_memory
from support.queue.queues import Queue
from support.trainers.replays import open_memory

from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayBatch, ReplayBounds, ReplayEntry, pack_entry

_T = TypeVar("_T")

MAX_BYTES = 1 << 20
# Three of the largest fit.
sizes = st.sampled_from([0, 3, 300, 300_000, 600_000])
weights = st.sampled_from([0.0, 1e-9, 0.25, 1.0, 1.0, 1.5, 8.0, 1e9])
rows = st.lists(st.tuples(sizes, weights), max_size=9)


@dataclass
class Written:
    """An entry as it was written."""

    number: int
    entry: ReplayEntry
    size_bytes: int


class Machine(RuleBasedStateMachine):
    """One memory, with two clients that both write and read."""

    server: EmbeddedServer
    bounds: ReplayBounds

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.runner = asyncio.Runner()
        self.rng = random.Random(seed)
        self.stack = contextlib.AsyncExitStack()
        settings = Settings(self.server.url)
        self.redis = self.stack.enter_context(redis.Redis.from_url(self.server.url))
        self.memories: list[ReplayMemory] = [
            self.run(self.stack.enter_async_context(open_memory(settings, self.bounds)))
            for _ in range(2)
        ]
        self.queue = Queue(settings)
        self.stack.push_async_callback(self.queue.close)
        self.base = self.run(self.memories[0].stats()).last
        # All that were ever written to this memory, how many have left its list, and how many were
        # dropped.
        self.written: list[Written] = []
        self.left, self.dropped = 0, 0
        # The server remembers it from one example to the next.
        self.writer, self.serial = secrets.token_hex(8), 0

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()

    def there(self) -> list[Written]:
        return self.written[self.left :]

    def made(self, given: Sequence[tuple[int, float]]) -> list[ReplayEntry]:
        made = []
        for size, weight in given:
            entry = ReplayEntry("accepted", f"{self.rng.random()}" + "x" * size, weight=weight)
            last = self.base + len(self.written) + 1
            self.written.append(Written(last, entry, len(pack_entry(entry))))
            made.append(entry)
        return made

    def bounded(self) -> None:
        while (
            len(self.there()) > self.bounds.entries
            or sum(each.size_bytes for each in self.there()) > MAX_BYTES
        ):
            self.left += 1

    @rule(given=rows, by=st.integers(0, 1))
    def write(self, given: Sequence[tuple[int, float]], by: int) -> None:
        for row in given:
            # One at a time: where many are written at once, what leaves is the same.
            assert self.run(self.memories[by].write(self.made([row]))) == 1
            self.bounded()

    @rule(given=rows, again=st.booleans())
    def write_together(self, given: Sequence[tuple[int, float]], again: bool) -> None:
        items = [(each.weight, pack_entry(each)) for each in self.made(given)]
        self.serial += 1
        for _ in range(1 + again):
            last = self.run(
                self.queue.run(
                    "replay_write",
                    name="m",
                    writer=self.writer,
                    serial=str(self.serial),
                    writer_ms=100_000,
                    randoms=self.rng.randbytes(6 * 400),
                    items=items,
                )
            )
            assert int(last) == self.base + len(self.written)
        self.bounded()

    @rule(refused=st.integers(0, 5), evict=st.integers(0, 5))
    def refuse(self, refused: int, evict: int) -> None:
        """As where the server is short of memory."""
        gone = min(evict, len(self.there()))
        answer = self.run(self.queue.run("replay_refuse", name="m", refused=refused, evict=evict))
        assert answer == refused + gone
        self.left += gone
        self.dropped += refused + gone

    @rule(back=st.integers(0, 30), limit=st.integers(1, 12), by=st.integers(0, 1))
    def read(self, back: int, limit: int, by: int) -> None:
        at = max(0, len(self.written) - back)
        batch = self.run(self.memories[by].read(self.base + at, limit=limit))
        expected = self.written[max(at, self.left) :][:limit]
        self.same(batch, expected)
        assert batch.missed == (max(at, self.left) - at if expected else 0)
        assert batch.offset == (expected[-1].number if expected else self.base + at)

    @rule(by=st.integers(0, 1))
    def read_all(self, by: int) -> None:
        batch = self.run(self.memories[by].read(limit=50))
        self.same(batch, self.there()[:50])

    @rule(n=st.integers(0, 40), by=st.integers(0, 1))
    def draw(self, n: int, by: int) -> None:
        self.drawn(self.run(self.memories[by].sample(n, rng=self.rng)), n, weighted=False)

    @rule(n=st.integers(0, 40), by=st.integers(0, 1))
    def draw_by_weight(self, n: int, by: int) -> None:
        batch = self.run(self.memories[by].sample(n, weighted=True, rng=self.rng))
        self.drawn(batch, n, weighted=True)

    @rule()
    def drop(self) -> None:
        self.run(self.memories[0].drop())
        assert self.kinds() <= {"writer"}
        before = self.base + len(self.written)
        self.base = self.run(self.memories[0].stats()).last
        assert self.base >= before
        self.written, self.left, self.dropped = [], 0, 0

    def same(self, batch: ReplayBatch, expected: Sequence[Written]) -> None:
        assert [*zip(batch.numbers, batch.entries, strict=True)] == [
            (each.number, each.entry) for each in expected
        ]
        assert batch.unreadable == 0

    def drawn(self, batch: ReplayBatch, n: int, *, weighted: bool) -> None:
        of = [each for each in self.population() if each.entry.weight or not weighted]
        assert len(batch) == (n if of else 0)
        entries = {each.number: each.entry for each in of}
        for number, entry in zip(batch.numbers, batch.entries, strict=True):
            assert entries[number] == entry

    def population(self) -> list[Written]:
        """What samples are drawn from."""
        if not self.bounds.reservoir:
            return self.there()
        slots = self.fields("slots")
        assert {int(slot) for slot in slots} == set(range(len(slots)))
        numbers = [int(value.partition(b" ")[0]) for value in slots.values()]
        assert len(set(numbers)) == len(numbers)
        return [self.written[number - self.base - 1] for number in numbers]

    def fields(self, kind: str) -> dict[bytes, bytes]:
        found: Any = self.redis.hgetall(self.queue.keys.of("replay", "m", kind))
        return dict(found)

    def kinds(self) -> set[str]:
        found = self.redis.scan_iter(self.queue.keys.of("replay", "m", "*"), count=1000)
        return {key.decode().split(":replay:m:")[1].partition(":")[0] for key in found}

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "written"):
            return
        stats = self.run(self.memories[0].stats())
        there = self.there()
        assert stats.entries == len(there) <= self.bounds.entries
        assert stats.size_bytes == sum(each.size_bytes for each in there) <= MAX_BYTES
        assert (stats.written, stats.evicted) == (len(self.written), self.left)
        assert stats.dropped == self.dropped
        assert stats.last == self.base + len(self.written)
        assert stats.first == stats.last - len(there) + 1
        population = self.population()
        assert stats.sampled == len(population) <= self.bounds.entries
        if self.bounds.reservoir:
            assert sum(each.size_bytes for each in population) <= MAX_BYTES
            assert len(population) > 0 or not self.written

    @invariant()
    def the_index_has_what_is_there_and_nothing_else(self) -> None:
        if not hasattr(self, "written"):
            return
        check_memory(self.redis, self.queue.keys.of("replay", "m"))
        weighed = [each.entry.weight for each in self.population() if each.entry.weight]
        found = [float(value.split()[1]) for value in self.fields("index").values()]
        assert sorted(found) == sorted(weighed)


FEW = profile(max_examples=3, stateful_step_count=15)
MANY = profile(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("reservoir", [False, True])
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_memory_is_its_model(server: EmbeddedServer, reservoir: bool, examples: profile) -> None:
    class Bounded(Machine):
        bounds = ReplayBounds(entries=12, max_mb=1, reservoir=reservoir, weighted=True)

    Bounded.server = server
    run_state_machine_as_test(Bounded, settings=examples)
