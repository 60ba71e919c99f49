"""Clients on a network that breaks, with a server that forgets, and with bugs of their own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis
from support.fleets import (
    HOUR_S,
    Recorder,
    connections,
    hurry,
    kill_connections,
    look,
    new_token,
    serving,
    short_lease,
    until,
)
from support.gateway.gateways import new_gateway
from support.producer.routes import first_shard
from support.queue.counted import check_counts
from support.queue.queues import Queue
from support.servers import Server, own_server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient, LeanQFuture
from leanq.errors import (
    ClosedError,
    LeanQError,
    RequestError,
    UnavailableError,
    UnknownEnvironmentError,
)
from leanq.queue.client_queue import ClientQueue
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard

DEADLINE_S = 20.0


pytestmark = pytest.mark.usefixtures("swept")


@pytest.fixture
def own() -> Iterator[Server]:
    with own_server() as server:
        yield server


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask for silent requests after moments."""
    hurry(monkeypatch, silence_s=0.1, block_s=0.1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients never ask for silent requests, so nothing else is mended by that."""
    hurry(monkeypatch, silence_s=HOUR_S)


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, *, after: bool = False) -> list[str]:
    """Makes the next call of a queue's method fail, as if on the wire; ``after`` it happened."""
    owner = ClientQueue if hasattr(ClientQueue, method) else Shard
    real: Callable[..., Any] = getattr(owner, method)
    failed: list[str] = []

    async def flaky(self: object, *args: Any, **options: Any) -> Any:
        first = not failed
        failed.append(method)
        if first and not after:
            raise UnavailableError("the wire broke")
        answer = await real(self, *args, **options)
        if first:
            raise UnavailableError("the wire broke")
        return answer

    monkeypatch.setattr(owner, method, flaky)
    return failed


def reached(items: Sized, count: int) -> bool:
    return len(items) >= count


def results(futures: list[LeanQFuture[bytes]]) -> list[bytes]:
    assert not wait(futures, DEADLINE_S).not_done
    return [future.result() for future in futures]


@pytest.mark.usefixtures("watchful")
def test_a_worker_outlives_the_server_as_well(own: Server) -> None:
    driver = Recorder()
    renewing = replace(own.settings, lease_s=1)
    with LeanQClient(own.settings) as lean, serving(renewing, driver, slots=2):
        futures = [lean.echo(b"held %d" % n) for n in range(10)]
        until(lambda: len(driver.running) == 2)
        own.stop()
        own.start()
        # The requests that the worker held are nobody's now. It stops them, and runs them anew.
        until(lambda: len(driver.stopped) == 2)
        driver.let_go()
        assert results(futures) == [b"held %d" % n for n in range(10)]
        status = look(own.settings)
        assert [row.held for row in status.workers] == [0]
        assert status.counters["settled"] == 10


@pytest.mark.slow
@pytest.mark.usefixtures("watchful")
def test_a_known_environment_is_waited_for_after_a_loss(
    own: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LeanQClient(own.settings) as lean:
        future = lean.echo(b"mine")
        until(lambda: is_acknowledged(lean, future.request_id))
        may_ask = block_lookups(monkeypatch)
        own.stop()
        own.start()
        # Another environment's worker is back sooner, and now this one looks like a mistake.
        with serving(own.settings, Recorder("other")):
            until(lambda: len(look(own.settings).workers) == 1)
            may_ask.set()
            wrong = lean.check("x", env="never")
            assert isinstance(wrong.exception(DEADLINE_S), UnknownEnvironmentError)
            until(lambda: future.done() or asked_again(lean, future.request_id))
            with serving(own.settings):
                assert future.result(DEADLINE_S) == b"mine"


def block_lookups(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until the event is set, clients that ask for their requests find no server."""
    real = ClientQueue.lookup
    may_ask = threading.Event()

    async def lookup(
        self: ClientQueue, client: str, request_ids: Sequence[str]
    ) -> list[bytes | bool]:
        if not may_ask.is_set():
            raise UnavailableError("the wire is broken")
        return await real(self, client, request_ids)

    monkeypatch.setattr(ClientQueue, "lookup", lookup)
    return may_ask


def is_acknowledged(lean: LeanQClient, request_id: str) -> bool:
    entry = first_shard(lean).outstanding.get(request_id)
    return entry is not None and entry.known


def asked_again(lean: LeanQClient, request_id: str) -> bool:
    """Whether the server was asked for the request and did not know it."""
    entry = first_shard(lean).outstanding[request_id]
    return entry.ask_at_s == 0.0


def test_cut_connections_lose_nothing_and_repeat_nothing(settings: Settings) -> None:
    driver = Recorder()
    with LeanQClient(settings) as lean, serving(settings, driver, slots=4):
        futures: list[LeanQFuture[bytes]] = []
        for cut in range(1, 6):
            futures += [lean.echo(b"%d" % n, delay_s=0.001) for n in range(len(futures), 100 * cut)]
            until(partial(reached, driver.started, 100 * cut - 60))
            kill_connections(settings)
        assert results(futures) == [b"%d" % n for n in range(500)]
        assert Counter(driver.started).most_common(1)[0][1] == 1
    counters = look(settings).counters
    assert (counters["settled"], counters.get("fenced", 0)) == (500, 0)


@pytest.mark.slow
def test_patience_ends_and_the_client_goes_on(own: Server) -> None:
    with LeanQClient(own.settings, unavailable_timeout_s=0.3) as lean:
        for _ in range(2):
            futures = [lean.echo(b"%d" % n) for n in range(3)]
            until(lambda: look(own.settings).counters.get("submitted") == 3)
            own.stop()
            futures.append(lean.echo(b"never sent"))
            for future in futures:
                with pytest.raises(UnavailableError) as refused:
                    future.result(DEADLINE_S)
                assert "\n" not in str(refused.value)
            assert len({id(future.exception()) for future in futures}) == 4
            own.start()
        with serving(own.settings):
            assert lean.echo(b"again").result(DEADLINE_S) == b"again"


# Faults that come in pairs


class Troubled:
    """A client whose requests wait while one fault follows another."""

    def __init__(self, own: Server, lean: LeanQClient) -> None:
        self.own, self.lean = own, lean
        # Each death counts as an attempt.
        self.settings = replace(short_lease(own.settings), max_attempts=20)
        self.waits: list[LeanQFuture[bytes]] = []
        self.send()

    def send(self) -> None:
        self.waits.append(self.lean.echo(b"%d" % len(self.waits)))
        until(lambda: self.in_queue() >= len(self.waits))

    def in_queue(self) -> int:
        status = look(self.settings)
        waiting = sum(row.waiting for row in status.priorities)
        return waiting + sum(row.held for row in status.workers)

    def outage(self) -> None:
        """The server forgets everything."""
        down_since = first_shard(self.lean).down_since
        self.own.stop()
        self.waits.append(self.lean.echo(b"%d" % len(self.waits)))
        until(lambda: {*down_since} == {"read", "submit"})
        self.own.start()
        until(lambda: not down_since)

    def cut(self) -> None:
        kill_connections(self.settings)

    def unreadable(self) -> None:
        """A reply that is none ends its request, and no other."""
        decoy, name = self.lean.echo(b"decoy"), first_shard(self.lean).client
        until(lambda: is_acknowledged(self.lean, decoy.request_id))
        with redis.Redis.from_url(self.settings.url) as stranger:
            stranger.xadd(Keys(self.settings.prefix).of("inbox", name), {decoy.request_id: b"no"})
        with pytest.raises(RequestError, match=r"cannot be read"):
            decoy.result(DEADLINE_S)

    def death(self) -> None:
        """A worker takes all that waits, and is never heard again."""

        async def claim() -> None:
            queue = Queue(self.settings)
            token = new_token()
            await queue.claim(f"dead {token[:-1]}", ["echo"], 99, busy=0, token=token)
            await queue.close()

        asyncio.run(claim())


# Each follows each other once, and itself.
ROUND = "outage outage cut outage unreadable outage death cut cut unreadable cut death unreadable "
ROUND += "unreadable death death outage"


@pytest.mark.usefixtures("watchful")
def test_faults_in_pairs_cost_no_request(own: Server) -> None:
    with LeanQClient(own.settings) as lean:
        troubled = Troubled(own, lean)
        for fault in ROUND.split():
            getattr(troubled, fault)()
            troubled.send()
        waits = troubled.waits
        assert not any(future.done() for future in waits)
        with serving(troubled.settings):
            assert results(waits) == [b"%d" % n for n in range(len(waits))]
            until(lambda: troubled.in_queue() == 0)
    with redis.Redis.from_url(own.settings.url) as server:
        check_counts(server, own.settings.prefix)


@pytest.mark.parametrize("way", ["redis", "gateway"])
async def test_a_close_that_is_cancelled_leaves_nothing_open(
    own: Server, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """However far it has come, and though the server is silent."""
    hurry(monkeypatch, close_s=0.05)
    async with contextlib.AsyncExitStack() as stack:
        if way == "gateway":
            gateway = await stack.enter_async_context(new_gateway(own.settings))

        def still_open() -> float:
            if way == "redis":
                return len(connections(own.settings))
            samples = {name: value for name, _, value in gateway.metrics.samples()}
            return float(samples["leanq_http_connections"])

        for turns in range(1, 7):
            url = own.settings.url if way == "redis" else gateway.url
            lean = await AsyncLeanQClient(url).__aenter__()
            asked = asyncio.create_task(lean.check("x"))
            await asyncio.sleep(0)
            own.send(signal.SIGSTOP)
            closing = asyncio.create_task(lean.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            for _ in range(2):
                closing.cancel()
                await asyncio.sleep(0)
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(asyncio.CancelledError):
                    await closing
                with pytest.raises(ClosedError):
                    await asked
            own.send(signal.SIGCONT)
            await eventually(lambda: not still_open())


def test_an_outage_in_which_no_request_waits_uses_up_no_patience(
    own: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LeanQClient(own.settings) as lean:
        first = lean.echo(b"")
        until(lambda: look(own.settings).counters.get("submitted") == 1)
        own.stop()
        shard_client = first_shard(lean)
        until(lambda: bool(shard_client.down_since))
        withdrawals = fail_once(monkeypatch, "cancel")
        first.cancel()
        until(lambda: len(withdrawals) >= 3)
        assert not shard_client.down_since
        own.start()


def test_a_request_that_the_server_never_takes_ends_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though all the while the server answers what the client reads."""
    hurry(monkeypatch, block_s=0.05)
    with own_server("--client-query-buffer-limit", "1mb") as server:
        with LeanQClient(server.settings, unavailable_timeout_s=1.0) as lean:
            large = lean.echo(bytes(2 << 20))
            with pytest.raises(UnavailableError, match="no answer from "):
                large.result(DEADLINE_S)
        with serving(server.settings), LeanQClient(server.settings) as lean:
            assert lean.echo(b"small").result(DEADLINE_S) == b"small"


@pytest.mark.usefixtures("patient")
def test_a_large_reply_that_fails_to_come_takes_no_other_with_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = fail_once(monkeypatch, "replies")
    driver = Recorder()
    payloads = [b"held small", b"held large" + bytes(100_000), b"held last"]
    with LeanQClient(settings) as lean, serving(settings, driver):
        futures = [lean.echo(payload) for payload in payloads]
        until(lambda: len(driver.running) == 3)
        # All three are settled in one call, and so are one entry of the inbox.
        driver.let_go()
        assert results(futures) == payloads
    assert len(fetches) == 2


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("own", [False, True])
def test_a_size_of_thousands_of_digits_ends_no_request(settings: Settings, own: bool) -> None:
    with LeanQClient(settings) as lean:
        future, name = lean.echo(b"waits"), first_shard(lean).client
        until(lambda: look(settings).counters.get("submitted") == 1)
        inbox = Keys(settings.prefix).of("inbox", name)
        with redis.Redis.from_url(settings.url) as stranger:
            stranger.xadd(inbox, {future.request_id if own else "0-other": b"9" * 5000})
            # A read drops what the one before has taken.
            stranger.xadd(inbox, {"0-other": b"9"})
            until(lambda: stranger.xlen(inbox) < 2)
        with serving(settings):
            assert future.result(DEADLINE_S) == b"waits"


@pytest.mark.usefixtures("patient")
def test_a_batch_with_an_unknown_environment_survives_a_break(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LeanQClient(settings) as lean, serving(settings):
        calls = fail_once(monkeypatch, "environments")
        wrong = [lean.check("x", env="never") for _ in range(100)]
        right = [lean.echo(b"%d" % n) for n in range(100)]
        assert results(right) == [b"%d" % n for n in range(100)]
        for future in wrong:
            assert isinstance(future.exception(DEADLINE_S), UnknownEnvironmentError)
        # Not one call for each of them.
        assert 2 <= len(calls) < 10


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["submit", "cancel"])
def test_a_call_whose_answer_is_lost_is_made_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    driver = Recorder()
    calls = fail_once(monkeypatch, method, after=after)
    with LeanQClient(settings) as lean, serving(settings, driver):
        withdrawn = lean.echo(b"held")
        until(lambda: driver.running == [b"held"])
        withdrawn.cancel()
        until(lambda: driver.stopped == [b"held"])
        assert lean.echo(b"next").result(DEADLINE_S) == b"next"
        until(lambda: len(calls) >= 2)
    assert driver.started == [b"held", b"next"]


@pytest.mark.parametrize("withdraw", [True, False])
def test_a_request_on_its_way_arrives_before_the_client_has_closed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, withdraw: bool
) -> None:
    real, on_its_way, arrives = ClientQueue.submit, threading.Event(), threading.Event()

    async def slow(self: ClientQueue, *args: Any) -> Any:
        on_its_way.set()
        await eventually(arrives.is_set)
        return await real(self, *args)

    monkeypatch.setattr(ClientQueue, "submit", slow)
    lean = LeanQClient(settings)
    shard_client = first_shard(lean)
    first = lean.echo(b"first")
    assert on_its_way.wait(DEADLINE_S)
    second = lean.echo(b"second")
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(lean.close, withdraw=withdraw)
        until(lambda: shard_client.outstanding.over is not None)
        arrives.set()
        closed.result(DEADLINE_S)
    counters = look(settings).counters
    if withdraw:
        assert (counters["submitted"], counters["verdict:cancelled"]) == (1, 1)
        return
    with LeanQClient(settings) as other, serving(settings):
        replies = other.attach([first.request_id, second.request_id])
        assert [reply.result(DEADLINE_S).payload for reply in replies] == [b"first", b"second"]


@pytest.mark.slow
@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("method", ["submit", "read_inbox", "lookup"])
def test_a_bug_ends_all_futures_rather_than_hang(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a fault\nof two lines")

    with LeanQClient(settings) as lean:
        first = lean.echo(b"")
        until(lambda: look(settings).counters.get("submitted") == 1)
        monkeypatch.setattr(ClientQueue, method, broken)
        futures = [first, *(lean.echo(b"") for _ in range(9))]
        for future in futures:
            with pytest.raises(LeanQError, match="failed: TypeError: a fault of two") as failed:
                future.result(DEADLINE_S)
            assert isinstance(failed.value.__cause__, TypeError)
        with pytest.raises(LeanQError, match="failed: TypeError"):
            lean.echo(b"").result(DEADLINE_S)
        monkeypatch.undo()
    with LeanQClient(settings) as other, serving(settings):
        assert other.attach([first.request_id])[0].result(DEADLINE_S).payload == b""


def test_a_silent_server_keeps_no_client_from_closing(
    own: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, close_s=0.1)
    lean = LeanQClient(own.settings)
    future = lean.echo(b"")
    until(lambda: look(own.settings).counters.get("submitted") == 1)
    own.send(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lean.close).result(10)
    assert isinstance(future.exception(0), ClosedError)
