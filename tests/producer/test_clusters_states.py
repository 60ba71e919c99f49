"""What several clusters know: identical requests, states, and requests by their request ids."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace
from support.fleets import HOUR_S, Recorder, serving, until
from support.producer.regions import DEADLINE_S, counted, results, urls
from support.producer.routes import clusters_of
from support.servers import Server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import ClosedError, LostError, UnavailableError, UnknownStateError
from leanq.lean.goals.recipes import Hole, Recipe, Source
from leanq.queue.requests import Reply, Request, Sorry
from leanq.states import States

FINGERPRINT = "f" * 64


class Checker(Recorder):
    """Makes a state of whatever it checks, and steps on the states that its cluster knows."""

    def __init__(self) -> None:
        super().__init__("default")

    @property
    def about(self) -> dict[str, object]:
        return {"fingerprint": FINGERPRINT}

    async def open(self, states: States) -> None:
        await super().open(states)
        self._states = states

    async def run(self, request: Request) -> Reply:
        return await super().run(replace(request, payload=request.code.encode() or b"step"))

    async def answer(self, request: Request) -> Reply:
        if request.op == "step":
            known = await self._states.recall(request.state)
            return Reply("accepted") if known else Reply(error="not known here")
        if b"held" in request.payload:
            await self.gate.wait()
        recipe = Recipe(Source(FINGERPRINT, request.code, (Hole(0, "term"),)), 0)
        await self._states.keep(dict(recipe.records()))
        sorries = (Sorry(1, 0, state=recipe.id),)
        return Reply("incomplete", sorries=sorries, fingerprint=FINGERPRINT)


def test_identical_requests_of_all_clients_meet(one: Server, other: Server) -> None:
    here, there = Checker(), Checker()
    with (
        serving(one.settings, here),
        serving(other.settings, there),
        LeanQClient(urls(one, other)) as lean,
        LeanQClient(urls(other, one)) as second,
    ):
        codes = [f"sorry held {n}" for n in range(20)]
        futures = [client.check(code) for client in (lean, second) for code in codes]
        until(lambda: counted("submitted", one, other) == 40)
        until(lambda: counted("waiting:default", one, other) == 0)
        here.let_go()
        there.let_go()
        results(futures)
    assert Counter(here.started + there.started) == Counter(code.encode() for code in codes)
    assert here.started
    assert there.started


def test_a_step_goes_to_its_state(one: Server, other: Server) -> None:
    with (
        serving(one.settings, Checker()),
        serving(other.settings, Checker()),
        LeanQClient(urls(one, other)) as lean,
        LeanQClient(urls(one, other)) as second,
        LeanQClient(urls(one, other)) as third,
    ):
        replies = results([lean.check(f"sorry {n}") for n in range(20)])
        states = [reply.sorries[0].state for reply in replies]
        lean.set_weights({one.settings.url: 0})
        steps = [lean.step(state, "simp") for state in states]
        # These two know neither, and the last of them is told the environment.
        steps += [second.step(state, "simp") for state in states]
        steps += [third.step(state, "simp", env="default") for state in states]
        assert {reply.verdict for reply in results(steps)} == {"accepted"}
        with pytest.raises(UnknownStateError):
            second.step("0" * 64, "simp").result(DEADLINE_S)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_may_know_it(one: Server, other: Server) -> None:
    with serving(other.settings, Checker()):
        one.stop()
        with LeanQClient(urls(one, other), unavailable_timeout_s=0.3) as lean:
            reply = lean.check("sorry").result(DEADLINE_S)
            # What is found elsewhere does not wait for it.
            state = reply.sorries[0].state
            assert lean.step(state, "simp").result(DEADLINE_S).verdict == "accepted"
            (known,) = lean.attach([reply.request_id])
            assert known.result(DEADLINE_S).request_id == reply.request_id
            with pytest.raises(UnavailableError):
                lean.step("0" * 64, "simp").result(DEADLINE_S)
            with pytest.raises(UnavailableError):
                lean.attach(["0-unknown"])[0].result(DEADLINE_S)
        one.start()
        with LeanQClient(urls(one, other)) as lean, pytest.raises(LostError):
            lean.attach(["0-unknown"])[0].result(DEADLINE_S)


async def test_a_look_up_that_is_cancelled(one: Server, other: Server) -> None:
    one.stop()
    async with AsyncLeanQClient(urls(one, other), unavailable_timeout_s=HOUR_S) as lean:
        step, closing = (asyncio.create_task(lean.step("0" * 64, "x")) for _ in range(2))
        way = clusters_of(lean)
        await eventually(lambda: len(way.outstanding) == 2)
        step.cancel()
        await eventually(lambda: len(way.outstanding) == 1)
    with pytest.raises(ClosedError):
        await closing
