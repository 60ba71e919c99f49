"""Both clients against a real server and real workers; test_client_trouble.py breaks things."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

import pytest
import redis
from support.fleets import (
    HOUR_S,
    Recorder,
    ask,
    connections,
    hurry,
    look,
    serving,
    until,
    working,
)
from support.paths import ROOT
from support.producer.routes import first_shard, thread_of
from support.servers import own_server
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient, LeanQFuture
from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    LostError,
    RequestError,
    TooLargeError,
    UsageError,
)
from leanq.queue.keys import Keys
from leanq.queue.requests import Failure, Reply, Request
from leanq.queue.settings import Settings
from leanq.queue.up_file import UpFile

DEADLINE_S = 20.0


pytestmark = pytest.mark.usefixtures("swept")


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "leanq-client"]


def inboxes(settings: Settings) -> set[int]:
    """The lengths of all that there are."""
    with redis.Redis.from_url(settings.url) as connection:
        found = connection.scan_iter(Keys(settings.prefix).of("inbox", "*"))
        return {connection.xlen(name) for name in found}


@pytest.mark.slow
def test_thousands_of_futures_share_two_connections_and_nothing_is_left(settings: Settings) -> None:
    others = connections(settings)
    with LeanQClient(settings) as lean:
        futures = [lean.echo(b"%d" % n) for n in range(3000)]
        until(lambda: look(settings).counters.get("submitted") == 3000)
        assert 1 <= len(connections(settings) - others) <= 2
        with serving(settings, slots=512):
            done, _ = wait(futures, DEADLINE_S)
        assert len(done) == 3000
        assert [future.result() for future in futures] == [b"%d" % n for n in range(3000)]
        assert len(connections(settings) - others) <= 2
        # Each read drops what came before it, so the inbox stays small.
        lean.echo(b"one more to read for")
        until(lambda: inboxes(settings) == {0})
        assert client_threads()
    assert not client_threads()
    assert not inboxes(settings)
    until(lambda: not connections(settings) - others)


def test_replies_come_in_any_order(settings: Settings) -> None:
    driver = Recorder()
    with LeanQClient(settings) as lean, serving(settings, driver):
        slow, quick = lean.echo(b"held"), lean.echo(b"quick")
        assert next(as_completed([slow, quick], DEADLINE_S)) is quick
        assert wait([slow, quick], DEADLINE_S, FIRST_COMPLETED).not_done == {slow}
        with pytest.raises(TimeoutError):
            slow.result(timeout=0.01)
        driver.let_go()
        assert slow.result(DEADLINE_S) == b"held"


def test_a_withdrawn_request_is_over_for_client_and_worker(settings: Settings) -> None:
    driver = Recorder()
    with LeanQClient(settings) as lean:
        queued = lean.echo(b"queued")
        until(lambda: look(settings).counters.get("waiting:echo") == 1)
        assert queued.cancel()
        # ``wait`` and ``as_completed`` do not go by ``cancelled()``.
        assert wait([queued], DEADLINE_S).done == {queued}
        until(lambda: look(settings).counters.get("waiting:echo") == 0)
        with serving(settings, driver):
            runs = lean.echo(b"runs", delay_s=HOUR_S)
            until(lambda: driver.running == [b"runs"])
            assert runs.cancel()
            assert list(as_completed([runs], DEADLINE_S)) == [runs]
            until(lambda: driver.stopped == [b"runs"])
            # Its slot is free again, and what has ended stays as it is.
            ended = lean.echo(b"ended")
            assert ended.result(DEADLINE_S) == b"ended"
            assert not ended.cancel()
            assert ended.result() == b"ended"
        assert driver.started == [b"runs", b"ended"]
        assert look(settings).counters["verdict:cancelled"] == 2


def test_what_is_withdrawn_before_it_is_sent_never_runs(settings: Settings) -> None:
    driver = Recorder()
    with LeanQClient(settings) as lean, serving(settings, driver):
        futures = [lean.echo(b"%d" % n) for n in range(600)]
        cancelled = [future for future in reversed(futures) if future.cancel()]
        assert cancelled
        assert len(wait(futures, DEADLINE_S).done) == 600
        until(lambda: look(settings).counters.get("waiting:echo", 0) == 0)


def test_close_ends_what_is_outstanding_and_withdraws_it(settings: Settings) -> None:
    driver = Recorder()
    with serving(settings, driver, slots=1):
        lean = LeanQClient(settings)
        futures = [lean.echo(b"held %d" % n) for n in range(600)]
        until(lambda: look(settings).counters.get("submitted") == 600)
        until(lambda: driver.running == [b"held 0"])
        lean.close()
        lean.close()
        for future in futures:
            with pytest.raises(ClosedError):
                future.result(timeout=0)
        until(lambda: b"held 0" in driver.stopped and not driver.running)
        assert look(settings).counters["verdict:cancelled"] == 600
        with pytest.raises(ClosedError):
            lean.echo(b"too late")
    errors = {id(future.exception()) for future in futures}
    assert len(errors) == 600, "raising a shared error adds to one traceback without end"


@pytest.mark.slow
def test_close_can_leave_requests_to_be_attached_to(settings: Settings) -> None:
    lean = LeanQClient(settings)
    # Most of them are still to be sent when it closes.
    futures = [lean.echo(b"%d" % n) for n in range(2500)]
    lean.close(withdraw=False)
    assert isinstance(futures[0].exception(timeout=0), ClosedError)
    with serving(settings), LeanQClient(settings) as other:
        replies = other.attach(future.request_id for future in futures)
        wait(replies, DEADLINE_S)
        assert [reply.result(0).payload for reply in replies] == [b"%d" % n for n in range(2500)]
        # The reply of one that has ended is there for the client that asks next.
        assert other.attach([futures[7].request_id])[0].result(DEADLINE_S).payload == b"7"


def test_a_client_can_close_the_moment_it_attached(settings: Settings) -> None:
    for _ in range(20):
        with LeanQClient(settings) as lean:
            (future,) = lean.attach(["0-unknown"])
        assert isinstance(future.exception(timeout=0), ClosedError | LostError)


def test_attaching_to_an_unknown_request_says_so(settings: Settings) -> None:
    with LeanQClient(settings) as lean:
        (future,) = lean.attach(["0-unknown"])
        with pytest.raises(LostError, match="0-unknown"):
            future.result(DEADLINE_S)
        for request_id in ("", "x", "0-", "0-" + 65 * "x", "1-elsewhere", "0-\ud800", "0-a\nb"):
            with pytest.raises(UsageError):
                lean.attach([request_id])
            with pytest.raises(UsageError):
                lean.echo(b"", request_id=request_id)
        assert not first_shard(lean).outstanding


def test_the_same_request_id_from_two_clients_ends_for_both(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server tells the client that asked last; the other asks.
    hurry(monkeypatch, silence_s=0.1)
    driver = Recorder()
    with LeanQClient(settings) as one, LeanQClient(settings) as two, serving(settings, driver):
        first = one.echo(b"held", request_id="0-shared")
        until(lambda: driver.running == [b"held"])
        second = two.echo(b"held", request_id="0-shared")
        driver.let_go()
        assert first.result(DEADLINE_S) == second.result(DEADLINE_S) == b"held"
    assert driver.started == [b"held"]


def test_the_same_request_id_twice_in_one_client_is_refused(settings: Settings) -> None:
    driver = Recorder()
    with LeanQClient(settings) as lean, serving(settings, driver):
        first, second = (lean.echo(b"held", request_id="0-twice") for _ in range(2))
        assert second.cancel() or isinstance(second.exception(DEADLINE_S), InvalidRequestError)
        third = lean.echo(b"held", request_id="0-twice")
        with pytest.raises(InvalidRequestError, match="already waits"):
            third.result(DEADLINE_S)
        driver.let_go()
        assert first.result(DEADLINE_S) == b"held"


async def test_the_client_for_threads_works_inside_an_event_loop(settings: Settings) -> None:
    async with working(settings):
        with LeanQClient(settings) as lean:
            futures = [asyncio.wrap_future(lean.echo(b"%d" % n)) for n in range(10)]
            assert await asyncio.gather(*futures) == [b"%d" % n for n in range(10)]
            # Cancelling what wraps a future withdraws as well.
            last = lean.echo(b"", delay_s=HOUR_S)
            asyncio.wrap_future(last).cancel()
            assert await asyncio.to_thread(wait, [last], DEADLINE_S)
            assert last.cancelled()


@pytest.mark.slow
def test_many_threads_share_a_client(settings: Settings) -> None:
    def user(number: int) -> list[bytes]:
        return [lean.echo(b"%d %d" % (number, n)).result(DEADLINE_S) for n in range(100)]

    with LeanQClient(settings) as lean, serving(settings), ThreadPoolExecutor(8) as pool:
        results = list(pool.map(user, range(8)))
    assert results == [[b"%d %d" % (number, n) for n in range(100)] for number in range(8)]


def test_a_request_that_races_with_close_ends_too(settings: Settings) -> None:
    lean = LeanQClient(settings)
    futures: list[LeanQFuture[bytes]] = []

    def user() -> None:
        while True:
            futures.append(lean.echo(b""))

    with ThreadPoolExecutor(4) as pool:
        users = [pool.submit(user) for _ in range(4)]
        until(lambda: len(futures) > 50)
        thread = thread_of(lean)
        lean.close()
        for ended in users:
            with pytest.raises(ClosedError):
                ended.result(DEADLINE_S)
    assert len(wait(futures, DEADLINE_S).done) == len(futures)
    # A user that got hold of the thread just before it ended.
    assert not thread.call(lambda: None)


def test_a_callback_may_submit_but_not_close(settings: Settings) -> None:
    more: list[LeanQFuture[bytes]] = []
    errors: list[BaseException] = []

    def called(_: object) -> None:
        more.append(lean.echo(b"second"))
        try:
            lean.close()
        except UsageError as error:
            errors.append(error)

    with LeanQClient(settings) as lean, serving(settings):
        lean.echo(b"first").add_done_callback(called)
        until(lambda: bool(errors))
        assert more[0].result(DEADLINE_S) == b"second"


def test_waiting_in_a_callback_is_an_error_and_no_deadlock(settings: Settings) -> None:
    errors: list[BaseException] = []
    done: list[bytes] = []
    driver = Recorder()

    def called(first: Future[bytes]) -> None:
        # What has ended can be read.
        done.append(first.result())
        assert wait([first]).done == {first}
        assert list(as_completed([first])) == [first]
        for wait_for_it in (
            other.result,
            other.exception,
            lambda: next(lean.map(["x"])),
        ):
            try:
                wait_for_it()
            except UsageError as error:
                errors.append(error)

    with LeanQClient(settings) as lean, serving(settings, driver):
        other = lean.echo(b"held")
        lean.echo(b"first").add_done_callback(called)
        until(lambda: len(errors) == 3)
        assert done == [b"first"]
        assert all("callback" in str(error) for error in errors)
        driver.let_go()
        assert wait([other], DEADLINE_S).done == {other}
        assert other.result(DEADLINE_S) == b"held"
        assert other.exception() is None


def test_a_future_runs_once_the_queue_has_acknowledged_it(settings: Settings) -> None:
    with LeanQClient(settings) as lean:
        future = lean.echo(b"x")
        until(future.running)
        assert look(settings).counters["submitted"] == 1
        (attached,) = lean.attach([lean.echo(b"y").request_id])
        # Unlike other futures, one that runs can be cancelled.
        assert future.cancel()
        assert not future.running()
        assert wait([future], DEADLINE_S).done
        with serving(settings):
            ended = lean.echo(b"z")
            assert ended.result(DEADLINE_S) == b"z"
            assert not ended.running()
        attached.cancel()


def test_a_future_touches_no_private_name_of_pythons_futures() -> None:
    theirs = {*dir(Future), *vars(Future())}
    ours = {*vars(LeanQFuture), *(set(vars(LeanQFuture("0-x"))) - set(vars(Future())))}
    assert {"result", "running"} <= ours & theirs
    private = {name for name in ours & theirs if name.startswith("_") and name[1] != "_"}
    assert private == set()


def test_a_client_finds_its_queue(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEANQ_URL", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for kind in (LeanQClient, AsyncLeanQClient):
        for given in ((), (None,)):
            with pytest.raises(UsageError, match=r"LEANQ_URL is not set and no 'leanq up' runs"):
                kind(*given)
    up = UpFile(os.environ)
    up.write(settings)
    with LeanQClient() as lean:
        assert lean.settings.url == settings.url
    assert AsyncLeanQClient().settings.url == settings.url
    monkeypatch.setenv("LEANQ_URL", "redis://elsewhere")
    assert AsyncLeanQClient().settings.url == "redis://elsewhere"
    up.remove()


class Judge(Recorder):
    """Notes what it is asked to verify."""

    def __init__(self) -> None:
        super().__init__("default")
        self.requests: list[Request] = []

    async def run(self, request: Request) -> Reply:
        self.requests.append(request)
        return Reply("rejected", reason="statement_differs", failed=(Failure("t", "r", "x"),))


async def test_a_verification_reaches_the_worker_as_it_was_asked(settings: Settings) -> None:
    judge = Judge()
    async with working(settings, judge), AsyncLeanQClient(settings) as other:
        with LeanQClient(settings) as lean:
            future = lean.verify("theorem t : True := sorry", "theorem t : True := trivial")
            reply = await asyncio.wrap_future(future)
        assert (reply.verdict, reply.failed) == ("rejected", (Failure("t", "r", "x"),))
        names = {"theorems": ["Nat.a", "Nat.b"], "holes": ["answer"]}
        await other.verify(None, "code", **names, trust_programs=True, scratch_mb=7)
    first, second = judge.requests
    assert (first.op, first.target) == ("verify", "theorem t : True := sorry")
    assert first.code == "theorem t : True := trivial"
    assert (second.target, second.theorems, second.holes) == ("", ("Nat.a", "Nat.b"), ("answer",))
    assert (second.trust_programs, second.scratch_mb) == (True, 7)


SCRIPT = """
import gc, os, signal, sys
from leanq import LeanQClient, UsageError
lean = LeanQClient(sys.argv[1])
"""
FORKS = """
def work_in_the_child():
    signal.alarm(60)
    outstanding.cancel()
    other = lean.echo(b"child").result(20)
    try:
        unended.result()
    except UsageError as error:
        assert "only the parent hears of its end" in str(error)
    else:
        os._exit(2)
    gc.collect()
    lean.close()
    os._exit(0 if other == b"child" else 1)
mine = lean.echo(b"parent")
outstanding = lean.echo(b"", delay_s=3600)
unended = lean.echo(b"", delay_s=3600)
with lean._lock:
    # As another thread of the parent may hold it just now.
    child = os.fork()
    if child == 0:
        work_in_the_child()
_, status = os.waitpid(child, 0)
assert status == 0, status
assert mine.result(20) == b"parent"
assert lean.echo(b"again").result(20) == b"again"
assert not outstanding.done()
lean.close()
print("done")
"""
IMPORTS_NOTHING_LATER = """
imported = set(sys.modules)
lean.echo(bytes(100_000)).result(20)
lean.echo(b"", delay_s=3600).cancel()
assert lean.attach(["0-unknown"])[0].exception(20)
lean.close()
assert set(sys.modules) == imported, set(sys.modules) - imported
print("done")
"""
FORGETS = """
lean.echo(b"parent").result(20)
lean.echo(b"", delay_s=3600)
print("done")
"""
# An import in the client's thread, amid which another thread forks, would break the child.
SCRIPTS = {"forks": FORKS, "imports nothing later": IMPORTS_NOTHING_LATER, "forgets": FORGETS}


@pytest.mark.slow
@pytest.mark.parametrize("body", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_that(body: str) -> None:
    # Newer Pythons warn of a fork beside threads, which is the very thing tried here.
    quiet = ("-W", "ignore::DeprecationWarning")
    with own_server() as server, serving(server.settings):
        ran = subprocess.run(
            [sys.executable, *quiet, "-c", SCRIPT + body, server.settings.url],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


async def test_cancelling_a_task_withdraws_its_request(settings: Settings) -> None:
    driver = Recorder()
    async with AsyncLeanQClient(settings) as lean, working(settings, driver):
        task = asyncio.create_task(lean.echo(b"held"))
        await eventually(lambda: driver.running == [b"held"])
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await eventually(lambda: driver.stopped == [b"held"])
        assert await lean.echo(b"next") == b"next"
        reply = await ask(lean, b"whole")
        assert (reply.payload, reply.attempts) == (b"whole", 1)
        assert await lean.attach(reply.request_id) == reply
        closed = asyncio.create_task(lean.echo(b"held"))
        await eventually(lambda: driver.running == [b"held"])
        await lean.close()
        with pytest.raises(ClosedError):
            await closed
        with pytest.raises(ClosedError):
            await lean.echo(b"too late")
    with pytest.raises(ClosedError, match="async with"):
        await AsyncLeanQClient(settings).echo(b"never entered")


def test_megabytes_travel_both_ways(settings: Settings) -> None:
    payload = bytes(range(256)) * (5 << 12)
    with LeanQClient(settings) as lean, serving(settings):
        futures = [lean.echo(payload), lean.echo(b"small"), lean.echo(payload)]
        assert [future.result(DEADLINE_S) for future in futures] == [payload, b"small", payload]
        with pytest.raises(TooLargeError):
            lean.echo(4 * payload)


@pytest.mark.slow
def test_a_deadline_passes_without_any_worker(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, silence_s=HOUR_S)
    with LeanQClient(settings) as lean:
        assert lean.check("x", deadline_s=0.2).result(DEADLINE_S).verdict == "expired"
        with pytest.raises(RequestError, match="expired"):
            lean.echo(b"", deadline_s=0.2).result(DEADLINE_S)


def test_placing_reaches_the_queue(settings: Settings) -> None:
    with LeanQClient(settings, tenant="mine") as lean:
        lean.echo(b"", request_id="0-chosen", priority=0)
        lean.echo(b"", tenant="other", priority=2)
        lean.echo(b"", tenant="mine", priority=2)
        until(lambda: look(settings).counters.get("submitted") == 3)
        rows = {(row.priority, row.tenants, row.waiting) for row in look(settings).priorities}
    assert rows == {(0, 1, 1), (2, 2, 2)}
