"""Clients of several clusters: real servers, with workers whose drivers need no Lean."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
from conftest import eventually
from fleets import HOUR_S, Recorder, Server, look, own_server, serving, until, working

from leanq import clusters, dispatch, inbox
from leanq.client import AsyncLeanQClient, LeanQClient, LeanQFuture
from leanq.clusters import SeveralClusters
from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    LeanQError,
    LostError,
    RequestError,
    UnavailableError,
    UnknownStateError,
)
from leanq.recipes import Hole, Recipe, Source
from leanq.states import States
from leanq.wire import Reply, Request, Sorry

DEADLINE_S = 20.0
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
            await self._gate.wait()
        recipe = Recipe(Source(FINGERPRINT, request.code, (Hole(0, "term"),)), 0)
        await self._states.keep(dict(recipe.records()))
        sorries = (Sorry(1, 0, state=recipe.id),)
        return Reply("incomplete", sorries=sorries, fingerprint=FINGERPRINT)


@pytest.fixture
def one() -> Iterator[Server]:
    with own_server() as server:
        yield server


@pytest.fixture
def other() -> Iterator[Server]:
    with own_server() as server:
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look into silence after moments."""
    monkeypatch.setattr(dispatch, "_FIRST_SILENCE_S", 0.1)
    monkeypatch.setattr(inbox, "_BLOCK_MS", 100)
    monkeypatch.setattr(clusters, "_SLOW_S", 0.1)
    monkeypatch.setattr(clusters, "_PROBE_S", 0.2)


def urls(*servers: Server) -> list[str]:
    return [server.settings.url for server in servers]


def route(lean: LeanQClient) -> SeveralClusters:
    assert lean._engine
    assert isinstance(lean._engine.switch, SeveralClusters)
    return lean._engine.switch


def counted(name: str, *servers: Server) -> int:
    return sum(look(server.settings).counters.get(name, 0) for server in servers)


def results(futures: list[LeanQFuture[Any]]) -> list[Any]:
    assert not wait(futures, DEADLINE_S).not_done
    return [future.result() for future in futures]


def payloads(count: int, start: int = 0, head: str = "") -> list[bytes]:
    return [f"{head}{n}".encode() for n in range(start, start + count)]


def test_traffic_is_in_proportion_to_the_weights(one: Server, other: Server) -> None:
    here, there = Recorder(), Recorder()
    text = "{}*3 {}*1".format(*urls(one, other))
    with (
        serving(one.settings, here),
        serving(other.settings, there),
        LeanQClient(text) as lean,
    ):
        sent = payloads(800)
        assert results([lean.echo(payload) for payload in sent]) == sent
        # Eight standard deviations.
        assert abs(len(here.started) - 600) < 100
        assert sorted(here.started + there.started) == sorted(sent)


def test_traffic_moves_and_what_is_in_flight_stays(one: Server, other: Server) -> None:
    here, there = Recorder(), Recorder()
    with (
        serving(one.settings, here, slots=20),
        serving(other.settings, there),
        LeanQClient(urls(one, other), weights=[1, 0]) as lean,
    ):
        old = [lean.echo(payload) for payload in payloads(40, head="held ")]
        until(lambda: len(here.running) == 20)
        lean.set_weights(dict(zip(urls(one, other), (0, 1), strict=True)))
        new = payloads(40)
        assert results([lean.echo(payload) for payload in new]) == new
        assert sorted(there.started) == sorted(new)
        here.let_go()
        assert results(old) == payloads(40, head="held ")
        assert sorted(here.started) == sorted(payloads(40, head="held "))


async def test_the_asyncio_client_moves_as_well(one: Server, other: Server) -> None:
    here, there = Recorder(), Recorder()
    async with (
        working(one.settings, here),
        working(other.settings, there),
        AsyncLeanQClient(urls(one, other), weights=[0, 1]) as lean,
    ):
        assert await lean.echo(b"there") == b"there"
        lean.set_weights({one.settings.url: 1, other.settings.url: 0})
        held = asyncio.create_task(lean.echo(b"held"))
        await eventually(lambda: here.running == [b"held"])
        held.cancel()
        await eventually(lambda: here.stopped == [b"held"])
        assert there.started == [b"there"]
    status = await asyncio.to_thread(look, one.settings)
    assert status.counters["verdict:cancelled"] == 1


@pytest.mark.usefixtures("quick")
def test_a_cluster_that_dies_and_comes_back(one: Server, other: Server) -> None:
    here, there = Recorder(), Recorder()
    with (
        serving(replace(one.settings, lease_s=1), here),
        serving(other.settings, there),
        LeanQClient(urls(one, other)) as lean,
    ):
        held = [lean.echo(payload) for payload in payloads(40, head="held ")]
        until(lambda: len(here.running) + len(there.running) == 40)
        mine = len(here.running)
        assert 0 < mine < 40
        one.stop()
        more = [lean.echo(payload) for payload in payloads(40)]
        assert results(more) == payloads(40)
        assert set(payloads(40)) <= set(there.started)
        there.let_go()
        until(lambda: sum(future.done() for future in held) == 40 - mine)
        one.start()
        # The worker takes up again what the client tells the server anew.
        until(lambda: len(here.stopped) == mine)
        here.let_go()
        assert results(held) == payloads(40, head="held ")
        # It is used again.
        before = len(here.started)
        until(lambda: route(lean)._each[0].up)
        results([lean.echo(payload) for payload in payloads(40)])
        assert len(here.started) > before


@pytest.mark.usefixtures("quick")
def test_what_a_silent_cluster_may_have_is_withdrawn_there(one: Server, other: Server) -> None:
    there = Recorder()
    with serving(other.settings, there), LeanQClient(urls(one, other), weights=[1, 0]) as lean:
        first = lean.echo(b"acknowledged")
        until(lambda: look(one.settings).counters.get("submitted") == 1)
        one.send(signal.SIGSTOP)
        futures = [lean.echo(payload) for payload in payloads(5)]
        # Only where its weight allows it.
        until(lambda: not route(lean)._each[0].up)
        assert not there.started
        lean.set_weights({other.settings.url: 1})
        assert results(futures) == payloads(5)
        assert not first.done()
        one.send(signal.SIGCONT)
        # It had the first batch of them all the while. What it acknowledged is still its own.
        until(lambda: counted("verdict:cancelled", one) > 0)
        until(lambda: counted("waiting:echo", one) == 1)
        with serving(one.settings), LeanQClient(urls(one, other)) as second:
            assert first.result(DEADLINE_S) == b"acknowledged"
            replies = results(second.attach(future.rid for future in [first, *futures]))
            assert [reply.payload for reply in replies] == [b"acknowledged", *payloads(5)]
    assert sorted(there.started) == payloads(5)


@pytest.mark.usefixtures("quick")
async def test_everything_ends_once_whatever_dies(one: Server, other: Server) -> None:
    ends: Counter[str] = Counter()
    answers: dict[str, bytes | None] = {}
    client = AsyncLeanQClient(urls(one, other))
    way = client._switch()
    await way.open()

    def send(payload: bytes) -> None:
        call = client._calls.echo(payload, 0.001, {})
        rid = call.submission.rid

        def done(end: Reply | LeanQError) -> None:
            ends[rid] += 1
            answers[rid] = end.payload if isinstance(end, Reply) else None

        way.send(call, done)

    async with working(replace(one.settings, lease_s=1)), working(other.settings):
        sent = 0
        for down in [one, other] * 3:
            for payload in payloads(100, sent):
                send(payload)
            sent += 100
            await eventually(lambda sent=sent: len(ends) > sent - 90)  # type: ignore[misc]
            down.stop()
            for payload in payloads(100, sent):
                send(payload)
            sent += 100
            await asyncio.sleep(0)
            down.start()
        await eventually(lambda: len(ends) == sent, 60.0)
        await way.close(withdraw=True)
    assert set(ends.values()) == {1}
    assert sorted(answers.values(), key=str) == sorted(payloads(sent), key=str)


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


def test_whoever_does_not_answer_may_know_it(one: Server, other: Server) -> None:
    with serving(other.settings, Checker()):
        one.stop()
        with LeanQClient(urls(one, other), patience_s=0.3) as lean:
            reply = lean.check("sorry").result(DEADLINE_S)
            # What is found elsewhere does not wait for it.
            state = reply.sorries[0].state
            assert lean.step(state, "simp").result(DEADLINE_S).verdict == "accepted"
            (known,) = lean.attach([reply.rid])
            assert known.result(DEADLINE_S).rid == reply.rid
            with pytest.raises(UnavailableError):
                lean.step("0" * 64, "simp").result(DEADLINE_S)
            with pytest.raises(UnavailableError):
                lean.attach(["0-unknown"])[0].result(DEADLINE_S)
        one.start()
        with LeanQClient(urls(one, other)) as lean, pytest.raises(LostError):
            lean.attach(["0-unknown"])[0].result(DEADLINE_S)


@pytest.mark.usefixtures("quick")
def test_a_cluster_that_was_down_at_first(one: Server, other: Server) -> None:
    one.stop()
    other.stop()
    with pytest.raises(UnavailableError):
        LeanQClient(urls(one, other))
    other.start()
    here = Recorder()
    with serving(other.settings), LeanQClient(urls(one, other)) as lean:
        assert results([lean.echo(payload) for payload in payloads(20)]) == payloads(20)
        one.start()
        with serving(one.settings, here):
            until(lambda: route(lean)._each[0].up)
            lean.set_weights({other.settings.url: 0})
            assert results([lean.echo(payload) for payload in payloads(20)]) == payloads(20)
            assert len(here.started) == 20


@pytest.mark.usefixtures("quick")
def test_patience_ends_where_no_cluster_answers(one: Server, other: Server) -> None:
    with LeanQClient(urls(one, other), patience_s=0.5) as lean:
        one.stop()
        other.stop()
        for future in [lean.echo(payload) for payload in payloads(10)]:
            with pytest.raises(UnavailableError):
                future.result(DEADLINE_S)
        assert not route(lean)._outstanding
        assert not any(cluster.waiting for cluster in route(lean)._each)
        one.start()
        with serving(one.settings):
            until(lambda: route(lean)._each[0].up)
            assert lean.echo(b"again").result(DEADLINE_S) == b"again"


@pytest.mark.usefixtures("quick")
def test_withdrawals_duplicates_and_the_end(one: Server, other: Server) -> None:
    with LeanQClient(urls(one, other)) as lean:
        futures = [lean.echo(payload) for payload in payloads(20)]
        again = lean.echo(b"0", rid=futures[0].rid)
        with pytest.raises(InvalidRequestError):
            again.result(DEADLINE_S)
        with pytest.raises(InvalidRequestError):
            lean.attach([futures[0].rid])[0].result(DEADLINE_S)
        assert futures[0].cancel()
        assert wait([futures[0]], DEADLINE_S).done
        with LeanQClient(urls(one, other)) as second:
            (attached,) = second.attach([futures[1].rid])
            until(lambda: len(route(second)._outstanding) == 1)
            assert attached.cancel()
        with pytest.raises(RequestError, match="cancelled"):
            futures[1].result(DEADLINE_S)
        lean.set_weights({one.settings.url: 1})
    for future in futures[2:]:
        assert isinstance(future.exception(0), ClosedError)
    assert counted("verdict:cancelled", one, other) == 20


async def test_a_look_up_that_is_cancelled(one: Server, other: Server) -> None:
    one.stop()
    async with AsyncLeanQClient(urls(one, other), patience_s=HOUR_S) as lean:
        step, closing = (asyncio.create_task(lean.step("0" * 64, "x")) for _ in range(2))
        way = lean._engine
        assert isinstance(way, SeveralClusters)
        await eventually(lambda: len(way._outstanding) == 2)
        step.cancel()
        await eventually(lambda: len(way._outstanding) == 1)
    with pytest.raises(ClosedError):
        await closing
