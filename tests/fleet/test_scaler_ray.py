"""Ray as the scaler's target, by a model of its actors; see ``make ray-test``, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet.rays import Actor, Ray

from leanq.errors import TargetError, UsageError
from leanq.fleet.stats import FleetStats
from leanq.queue import wire
from leanq.queue.ray_cluster import published
from leanq.queue.results import Status, WorkerRow
from leanq.queue.settings import Settings

MOST = 8
QUEUE = Settings(url="redis://:secret@head", prefix="mine")


def new_target(worker: str = "", slots: int = 2, environments: tuple[str, ...] = ("echo",)) -> Any:
    from leanq.fleet.scaler.ray import RayTarget

    return RayTarget(QUEUE, environments, worker=worker, slots=slots)


def workers(ray: Ray) -> list[Actor]:
    return [actor for actor in ray.actors.values() if actor.name.startswith("worker-")]


def seen(ray: Ray) -> FleetStats:
    rows = tuple(
        WorkerRow(f"w{n}", 5.0, a.held, wire.pack_info({"job": a.name, "started": 1.0}))
        for n, a in enumerate(workers(ray))
        if a.worker
    )
    return FleetStats(0.0, Status({}, {}, rows, (), {}, 0), {})


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("order"), st.integers(0, MOST)),
            st.tuples(
                st.sampled_from(("start", "join", "busy", "node", "drained", "scaler")), st.just(0)
            ),
        ),
        max_size=30,
    )
)
def test_the_fleet_is_what_was_ordered(events: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        ray = Ray()
        ray.install(patch)
        target = new_target()
        for what, number in events:
            if what == "order":
                _order(ray, target, number, runner)
            elif what == "scaler":
                # Before it takes workers away, a new scaler watches for longer than a drain takes.
                _ends(ray)
                target = new_target()
            elif what == "drained":
                _ends(ray)
            else:
                _happens(what, workers(ray))


def _order(ray: Ray, target: Any, number: int, runner: asyncio.Runner) -> None:
    ordered = runner.run(target.look("echo", seen(ray)))
    wanted = [actor for actor in workers(ray) if not actor.told]
    assert ordered.order == len(wanted)
    assert len(ordered.starting_s) == sum(not actor.worker for actor in wanted)
    runner.run(target.order("echo", number, seen(ray)))
    stay = [actor for actor in workers(ray) if not actor.told]
    assert len(stay) == number
    going = [actor for actor in wanted if actor not in stay]
    # No worker is killed, and none goes while one stays that waits or holds less.
    assert not any(actor.killed and actor.running for actor in going)
    for rank in (lambda a: a.worker, lambda a: a.held):
        assert not going or not stay or max(map(rank, going)) <= min(map(rank, stay))


def _ends(ray: Ray) -> None:
    for actor in workers(ray):
        if actor.told:
            del ray.actors[actor.name]


def _happens(what: str, actors: list[Actor]) -> None:
    for actor in actors:
        if what == "start" and not actor.running:
            actor.running = True
            return
        if what == "join" and actor.running and not actor.worker:
            actor.worker = True
            return
        if what == "busy" and actor.worker and not actor.held:
            actor.held = 1
            return
        if what == "node" and actor.running:
            # Ray starts it again elsewhere, where it knows of no order to drain.
            was_told = actor.told
            actor.running = actor.worker = actor.told = False
            actor.held = 0
            if was_told:
                actor.running = actor.told = True
            return


async def test_a_worker_takes_cpus_and_options_and_no_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray()
    ray.install(monkeypatch)
    target = new_target("--env '{env}=/srv/{env}' --nice 19", 8, ("a", "b"))
    assert await target.leads()
    await target.look("a", seen(ray))
    await target.order("a", 1, seen(ray))
    (actor,) = workers(ray)
    assert (actor.options["num_cpus"], actor.options["max_restarts"]) == (8, -1)
    assert actor.options["lifetime"] == "detached"
    name, prefix, options = actor.arguments
    assert (name, prefix) == (actor.name, "mine")
    assert options == ["--slots", "8", "--env", "a=/srv/a", "--nice", "19"]
    # The scaler of b does not take them for its own.
    assert (await target.look("b", seen(ray))).order == 0
    assert "secret" not in repr((actor.options, actor.arguments))
    assert published({"LEANQ_PREFIX": "mine"})["LEANQ_URL"] == QUEUE.url


async def test_one_scaler_leads_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    ray.install(monkeypatch)
    one, other = new_target(), new_target()
    assert [await one.leads(), await other.leads(), await one.leads()] == [True, False, True]
    ray.actors.clear()
    assert [await other.leads(), await one.leads()] == [True, False]


async def test_one_that_was_told_to_go_and_started_again_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray()
    ray.install(monkeypatch)
    target = new_target()
    await target.order("echo", 1, seen(ray))
    (actor,) = workers(ray)
    actor.running = actor.worker = True
    assert (await target.look("echo", seen(ray))).order == 1
    await target.order("echo", 0, seen(ray))
    assert actor.told
    actor.told = False
    assert (await target.look("echo", seen(ray))).order == 0
    assert actor.told


async def test_what_ray_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    ray.install(monkeypatch)
    target = new_target()
    ray.away = True
    with pytest.raises(TargetError, match="Ray: no answer"):
        await target.look("echo", seen(ray))
    with pytest.raises(TargetError, match="Ray: no answer"):
        await target.leads()
    with pytest.raises(UsageError, match="no Ray cluster is found; run the scaler on one of its"):
        new_target()
    with pytest.raises(UsageError, match="cannot be read"):
        new_target("--env '")
