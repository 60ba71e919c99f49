"""Clients whose requests wait while no worker is alive for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import hurry, look, serving, until
from support.queue.queues import Queue

from leanq import LeanQClient, NoWorkerError
from leanq.producer.shard_router import Silence
from leanq.queue.operator_queue import look as look_at
from leanq.queue.settings import Settings

DEADLINE_S = 20.0

pytestmark = pytest.mark.usefixtures("swept")


@pytest.fixture
def warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """What clients log, which look after moments."""
    hurry(monkeypatch, no_worker_s=0.05)
    caplog.set_level(logging.WARNING, "leanq.client")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "leanq.client"
    ]


@pytest.mark.parametrize(
    ("count", "waiting"),
    [
        (1, "1 request of this client waits"),
        pytest.param(3, "3 requests of this client wait", marks=pytest.mark.slow),
    ],
)
def test_a_warning_names_the_environment_and_what_waits(
    settings: Settings, warnings: Callable[[], list[str]], count: int, waiting: str
) -> None:
    with serving(settings), LeanQClient(settings) as lean:
        # The queue knows of no environment before a worker offered one.
        assert lean.echo(b"x").result(DEADLINE_S) == b"x"
    with LeanQClient(settings) as lean:
        futures = [lean.echo(b"x") for _ in range(count)]
        until(lambda: bool(warnings()))
        (first, *_) = warnings()
        assert first.startswith("no worker is alive for the environment 'echo' at ")
        assert f"{waiting}; start one with 'leanq worker'" in first
        assert not any(future.done() for future in futures)
        with serving(settings):
            assert [future.result(DEADLINE_S) for future in futures] == count * [b"x"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_client_may_be_told_not_to_wait(
    settings: Settings, warnings: Callable[[], list[str]], shards: int
) -> None:
    several = replace(settings, shards=shards)
    with LeanQClient(several, no_worker="raise") as lean:
        futures = [lean.echo(b"x") for _ in range(8)]
        cancelled = lean.echo(b"withdrawn")
        assert cancelled.cancel()
        for future in futures:
            with pytest.raises(NoWorkerError, match="environment 'echo'"):
                future.result(DEADLINE_S)
        assert not warnings()
        # They are withdrawn from the queue, too.
        until(lambda: withdrawn(several) >= 8)
        with serving(several):
            for shard in range(shards):
                future = lean.echo(b"next", request_id=f"{shard}-next")
                assert future.result(DEADLINE_S) == b"next"


def withdrawn(settings: Settings) -> int:
    return asyncio.run(look_at(settings)).counters.get("verdict:cancelled", 0)


def test_a_paused_environment_is_no_error(
    settings: Settings, warnings: Callable[[], list[str]]
) -> None:
    async def pause(hold: bool) -> None:
        queue = Queue(settings)
        await queue.set_paused("environment", "echo", paused=hold)
        await queue.close()

    asyncio.run(pause(True))
    with LeanQClient(settings, no_worker="raise") as lean:
        future = lean.echo(b"x")
        until(lambda: bool(warnings()))
        assert warnings()[0].startswith("the environment 'echo' is paused: 1 request of this")
        assert not future.done()
        with serving(settings):
            asyncio.run(pause(False))
            assert future.result(DEADLINE_S) == b"x"
    assert look(settings).counters["settled"] == 1


def test_a_paused_tenant_is_said_though_workers_are_alive(
    settings: Settings, warnings: Callable[[], list[str]]
) -> None:
    async def pause(hold: bool) -> None:
        queue = Queue(settings)
        await queue.set_paused("tenant", "forgotten", paused=hold)
        await queue.close()

    asyncio.run(pause(True))
    try:
        with serving(settings), LeanQClient(settings, no_worker="raise") as lean:
            future = lean.echo(b"x", tenant="forgotten")
            until(lambda: bool(warnings()))
            assert warnings()[0] == (
                "the tenant 'forgotten' is paused: 1 request of this client will run once an "
                "operator resumes it (leanq resume --tenant forgotten)"
            )
            asyncio.run(pause(False))
            assert future.result(DEADLINE_S) == b"x"
    finally:
        asyncio.run(pause(False))


def test_nothing_is_said_while_a_worker_is_alive(
    settings: Settings, warnings: Callable[[], list[str]]
) -> None:
    with serving(settings), LeanQClient(settings, no_worker="raise") as lean:
        assert lean.echo(b"slow", delay_s=0.5).result(DEADLINE_S) == b"slow"
    assert not warnings()


def test_intervals_double_until_an_answer_comes() -> None:
    silence = Silence(5.0)
    looks = [
        now for now in range(200) if silence.due({"default"}, set(), float(now)) == ["default"]
    ]
    assert looks == [5, 15, 35, 75, 155]
    assert silence.due({"default"}, {"default"}, 200.0) == []
    assert silence.due({"default"}, set(), 201.0) == []
    assert silence.due({"default"}, set(), 206.0) == ["default"]


NAMES = st.frozensets(st.sampled_from("abc"))


@pytest.mark.slow
@given(st.lists(st.tuples(NAMES, NAMES, st.floats(0, 50)), max_size=30))
def test_only_silent_environments_are_ever_due(
    ticks: list[tuple[frozenset[str], frozenset[str], float]],
) -> None:
    silence, now_s = Silence(5.0), 0.0
    silent_since: dict[str, float] = {}
    for waiting, answered, after_s in ticks:
        now_s += after_s
        silent_since = {n: silent_since.get(n, now_s) for n in waiting - answered}
        for name in silence.due(waiting, answered, now_s):
            assert now_s - silent_since[name] >= 5.0
