"""Clients of several clusters: real servers, with workers whose drivers need no Lean."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from concurrent.futures import wait
from dataclasses import replace

import pytest
from support.fleets import Recorder, hurry, look, serving, until, working
from support.producer.regions import DEADLINE_S, counted, in_its_thread, payloads, results, urls
from support.producer.routes import clusters_of
from support.servers import Server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    LeanQError,
    RequestError,
    UnavailableError,
)
from leanq.producer.cluster_router import ClusterRouter
from leanq.producer.request_builder import RequestBuilder
from leanq.producer.route import Clusters, RouteOptions
from leanq.queue.requests import Reply


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look into silence after moments."""
    hurry(monkeypatch, silence_s=0.1, block_s=0.1, slow_submit_s=0.1, probe_s=2.0)


@pytest.mark.slow
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


@pytest.mark.slow
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
        until(lambda: clusters_of(lean).clusters[0].up)
        results([lean.echo(payload) for payload in payloads(40)])
        assert len(here.started) > before


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_what_a_silent_cluster_may_have_is_withdrawn_there(one: Server, other: Server) -> None:
    there = Recorder()
    with serving(other.settings, there), LeanQClient(urls(one, other), weights=[1, 0]) as lean:
        first = lean.echo(b"acknowledged")
        # The server counts it before the client knows.
        until(first.running)
        one.send(signal.SIGSTOP)
        futures = [lean.echo(payload) for payload in payloads(5)]
        # Only where its weight allows it.
        until(lambda: not clusters_of(lean).clusters[0].up)
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
            replies = results(second.attach(future.request_id for future in [first, *futures]))
            assert [reply.payload for reply in replies] == [b"acknowledged", *payloads(5)]
    assert sorted(there.started) == payloads(5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_nothing_goes_back_to_where_it_was_withdrawn(one: Server, other: Server) -> None:
    with serving(other.settings), LeanQClient(urls(one, other), weights=[1, 0]) as lean:
        here, there = clusters_of(lean).clusters
        one.send(signal.SIGSTOP)
        future = lean.echo(b"moved")
        until(lambda: not here.up)
        other.send(signal.SIGSTOP)
        lean.set_weights({other.settings.url: 1})
        until(lambda: not there.up)
        one.send(signal.SIGCONT)
        until(lambda: counted("verdict:cancelled", one) == 1)
        until(lambda: here.up)
        # As its next probe would.
        in_its_thread(lean, lambda: clusters_of(lean).move_from(there))
        assert list(there.waiting) == [future.request_id]
        other.send(signal.SIGCONT)
        assert future.result(DEADLINE_S) == b"moved"


class Counting:
    """Counts how often a request ends, and keeps its answer."""

    def __init__(
        self, request_id: str, ends: Counter[str], answers: dict[str, bytes | None]
    ) -> None:
        self.request_id, self.ends, self.answers = request_id, ends, answers

    def acknowledged(self) -> None:
        pass

    def ended(self, end: Reply | LeanQError) -> None:
        self.ends[self.request_id] += 1
        self.answers[self.request_id] = end.payload if isinstance(end, Reply) else None


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_everything_ends_once_whatever_dies(one: Server, other: Server) -> None:
    ends: Counter[str] = Counter()
    answers: dict[str, bytes | None] = {}
    options = RouteOptions(timings=AsyncLeanQClient.timings)
    way = ClusterRouter(Clusters.load(urls(one, other), None, {}), options)
    await way.open()
    builder = RequestBuilder(one.settings, "default")

    def send(payload: bytes) -> None:
        prepared = builder.echo(payload, 0.001, {})
        way.send(prepared, Counting(prepared.submission.request_id, ends, answers))

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


@pytest.mark.usefixtures("quick")
def test_a_cluster_that_was_down_at_first(one: Server, other: Server) -> None:
    one.stop()
    other.stop()
    with pytest.raises(UnavailableError):
        LeanQClient(urls(one, other))
    other.start()
    here = Recorder()
    with serving(other.settings), LeanQClient(urls(one, other)) as lean:
        down = clusters_of(lean).clusters[0]
        futures = [lean.echo(payload) for payload in payloads(20)]
        tried: list[str] = []
        in_its_thread(lean, lambda: tried.extend(down.waiting))
        assert tried == []
        assert results(futures) == payloads(20)
        one.start()
        with serving(one.settings, here):
            until(lambda: down.up)
            lean.set_weights({other.settings.url: 0})
            assert results([lean.echo(payload) for payload in payloads(20)]) == payloads(20)
            assert len(here.started) == 20


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_patience_ends_where_no_cluster_answers(one: Server, other: Server) -> None:
    with LeanQClient(urls(one, other), unavailable_timeout_s=0.5) as lean:
        one.stop()
        other.stop()
        for future in [lean.echo(payload) for payload in payloads(10)]:
            with pytest.raises(UnavailableError):
                future.result(DEADLINE_S)
        assert not clusters_of(lean).outstanding
        assert not any(cluster.waiting for cluster in clusters_of(lean).clusters)
        one.start()
        with serving(one.settings):
            until(lambda: clusters_of(lean).clusters[0].up)
            assert lean.echo(b"again").result(DEADLINE_S) == b"again"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_withdrawals_duplicates_and_the_end(one: Server, other: Server) -> None:
    with LeanQClient(urls(one, other)) as lean:
        futures = [lean.echo(payload) for payload in payloads(20)]
        again = lean.echo(b"0", request_id=futures[0].request_id)
        with pytest.raises(InvalidRequestError):
            again.result(DEADLINE_S)
        with pytest.raises(InvalidRequestError):
            lean.attach([futures[0].request_id])[0].result(DEADLINE_S)
        assert futures[0].cancel()
        assert wait([futures[0]], DEADLINE_S).done
        with LeanQClient(urls(one, other)) as second:
            (attached,) = second.attach([futures[1].request_id])
            until(lambda: len(clusters_of(second).outstanding) == 1)
            assert attached.cancel()
        with pytest.raises(RequestError, match="cancelled"):
            futures[1].result(DEADLINE_S)
        lean.set_weights({one.settings.url: 1})
    for future in futures[2:]:
        assert isinstance(future.exception(0), ClosedError)
    assert counted("verdict:cancelled", one, other) == 20
