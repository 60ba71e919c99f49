"""The queue machine, scripts against the model, with requests that name affinities."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import redis
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from msgspec import structs
from support.queue.queue_machine import (
    LEASE_MS,
    MAX_ATTEMPTS,
    PROFILE,
    SOAK,
    QueueMachine,
    clients,
    some,
    submissions,
)
from support.queue.shards import with_test_clock
from support.queue.warm_model import WarmModel

import leanq.queue.shard
import leanq.queue.worker_queue
from leanq.local import EmbeddedServer
from leanq.queue.results import Submission
from leanq.queue.settings import Settings

affinities = st.lists(st.sampled_from(("x", "y", "z")), max_size=2, unique=True)
workers = st.integers(0, 1)
batches = st.lists(st.tuples(submissions, affinities), min_size=1, max_size=6)


class WarmMachine(QueueMachine):
    model: WarmModel
    model_type = WarmModel

    @rule(client=clients, batch=batches, again=some)
    def submit_pinned(
        self, client: str, batch: list[tuple[Submission, list[str]]], again: list[int]
    ) -> None:
        items = [structs.replace(item, affinity=tuple(names)) for item, names in batch]
        self.submit(client, items, again, [])

    @rule(
        each=st.lists(affinities, min_size=4, max_size=20),
        number=workers,
        waits=st.lists(st.sampled_from((0, 1_000, 2_000)), min_size=2, max_size=4),
    )
    def pile_up(self, each: list[list[str]], number: int, waits: list[int]) -> None:
        """A worker draws from a long line, one by one."""
        plain = Submission("new", "a", "s", 0, 0, 100_000, b"body")
        self.submit_pinned("c", [(plain, names) for names in each], [])
        for ms in waits:
            self.advance(ms)
            self.claim(number, ["a"], 1, list(range(1, 40)), "")

    def server_is_as_the_model_says(self) -> None:
        super().server_is_as_the_model_says()
        found, model = self.found, self.model
        assert found.warm == {name: seen for name, seen in model.warm.items() if seen}
        stats = found.hashes.get("stats", {})
        for name in ("warm_hits", "warm_misses"):
            assert int(stats.get(name, 0)) == model.counts[name], name


@pytest.mark.slow
@pytest.mark.timeout(0 if SOAK else 240)
def test_scripts_do_what_the_model_says_of_warm_workers(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leanq.queue.shard, "script_text", with_test_clock)
    monkeypatch.setattr(leanq.queue.worker_queue, "_UNUSUAL_S", 0.0)
    WarmMachine.settings = replace(
        Settings.load(server.url, {}),
        lease_s=LEASE_MS / 1000,
        max_attempts=MAX_ATTEMPTS,
        # More than a claim looks at.
        max_waiting=24,
        remember_s=3600.0,
    )
    WarmMachine.loop = asyncio.new_event_loop()
    WarmMachine.server = redis.Redis.from_url(server.url)
    try:
        run_state_machine_as_test(WarmMachine, settings=profile(PROFILE, max_examples=SOAK or 60))
    finally:
        WarmMachine.server.close()
        WarmMachine.loop.close()
