"""The real scripts against the model, on a real server, with time in the test's hands.

``LEANQ_SOAK=2000`` runs so many examples, new ones each time; without it a few, always the same.
"""

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
    MAX_WAITING,
    PROFILE,
    SOAK,
    QueueMachine,
    clients,
    some,
    submissions,
    workers,
)
from support.queue.shards import with_test_clock
from support.queue.warm_model import WarmModel

import leanq.queue.shard
import leanq.queue.worker_queue
from leanq.local import EmbeddedServer
from leanq.queue.results import Submission
from leanq.queue.settings import Settings

affinities = st.lists(st.sampled_from(("x", "y", "z")), max_size=2, unique=True)
batches = st.lists(st.tuples(submissions, affinities), min_size=1, max_size=6)


class WarmMachine(QueueMachine):
    """With requests that name affinities."""

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


# What most bugs need, for each change.
FEW = profile(PROFILE, max_examples=8, stateful_step_count=40)
# Of requests with affinities more wait than a claim looks at.
WARM = (WarmMachine, 24, profile(PROFILE, max_examples=SOAK or 60))


@pytest.mark.parametrize(
    ("machine", "max_waiting", "examples"),
    [
        pytest.param(QueueMachine, MAX_WAITING, FEW, id="a few"),
        pytest.param(QueueMachine, MAX_WAITING, PROFILE, id="many", marks=pytest.mark.slow),
        pytest.param(*WARM, id="warm", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(0 if SOAK else 240)
def test_scripts_do_what_the_model_says(
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    machine: type[QueueMachine],
    max_waiting: int,
    examples: profile,
) -> None:
    monkeypatch.setattr(leanq.queue.shard, "script_text", with_test_clock)
    monkeypatch.setattr(leanq.queue.worker_queue, "_UNUSUAL_S", 0.0)
    machine.settings = replace(
        Settings.load(server.url, {}),
        lease_s=LEASE_MS / 1000,
        max_attempts=MAX_ATTEMPTS,
        max_waiting=max_waiting,
        remember_s=3600.0,
    )
    machine.loop = asyncio.new_event_loop()
    machine.server = redis.Redis.from_url(server.url)
    try:
        run_state_machine_as_test(machine, settings=examples)
    finally:
        machine.server.close()
        machine.loop.close()
