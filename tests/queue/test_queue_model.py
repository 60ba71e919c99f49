"""The real scripts against the model, on a real server, with time in the test's hands.

``LEANQ_SOAK=2000`` runs so many examples, new ones each time; without it a few, always the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import redis
from hypothesis import settings as profile
from hypothesis.stateful import run_state_machine_as_test
from support.queue.queue_machine import (
    LEASE_MS,
    MAX_ATTEMPTS,
    MAX_WAITING,
    PROFILE,
    SOAK,
    QueueMachine,
)
from support.queue.shards import with_test_clock

import leanq.queue.shard
import leanq.queue.worker_queue
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings


@pytest.mark.parametrize(
    "examples",
    [
        # What most bugs need, for each change.
        pytest.param(profile(PROFILE, max_examples=8, stateful_step_count=40), id="a few"),
        pytest.param(PROFILE, id="many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(0 if SOAK else 240)
def test_scripts_do_what_the_model_says(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, examples: profile
) -> None:
    monkeypatch.setattr(leanq.queue.shard, "script_text", with_test_clock)
    monkeypatch.setattr(leanq.queue.worker_queue, "_UNUSUAL_S", 0.0)
    QueueMachine.settings = replace(
        Settings.load(server.url, {}),
        lease_s=LEASE_MS / 1000,
        max_attempts=MAX_ATTEMPTS,
        max_waiting=MAX_WAITING,
        remember_s=3600.0,
    )
    QueueMachine.loop = asyncio.new_event_loop()
    QueueMachine.server = redis.Redis.from_url(server.url)
    try:
        run_state_machine_as_test(QueueMachine, settings=examples)
    finally:
        QueueMachine.server.close()
        QueueMachine.loop.close()
