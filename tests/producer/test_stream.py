"""Streams of results: from a thread, from an event loop, and by the client for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest
from support.fleets import Recorder, look, serving, until, working
from support.queue.queues import Queue
from support.waiting import eventually

from leanq import AsyncLeanQClient, LeanQClient, Result
from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    RequestError,
    TooLargeError,
    UnknownEnvironmentError,
    UsageError,
)
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import MAX_REQUEST_BYTES, Settings

pytestmark = pytest.mark.usefixtures("swept")

Stream = Callable[..., AsyncGenerator[Result, None]]


class Checker(Recorder):
    """Accepts every code, and keeps those that begin with ``held`` until :meth:`let_go`."""

    def __init__(self) -> None:
        super().__init__(environment="default")
        self.ended: list[str] = []

    async def run(self, request: Request) -> Reply:
        payload = request.code.encode()
        reply = await super().run(Request("echo", payload=payload))
        self.ended.append(request.code)
        if request.code == "broken":
            return Reply(error="no Lean here")
        return Reply("accepted", axioms=request.allow_axioms) if reply.error is None else reply


@pytest.fixture
async def checker(settings: Settings) -> AsyncIterator[Checker]:
    driver = Checker()
    async with working(settings, driver, slots=64):
        yield driver


def in_threads(lean: LeanQClient) -> Stream:
    """``lean.map``, for tests that are in an event loop."""

    async def each(results: Generator[Result, None, None]) -> AsyncGenerator[Result, None]:
        try:
            while result := await asyncio.to_thread(next, results, None):
                yield result
        finally:
            results.close()

    return lambda codes, **options: each(lean.map(codes, **options))


@pytest.fixture
async def streams(settings: Settings) -> AsyncIterator[dict[str, Stream]]:
    async with AsyncLeanQClient(settings) as other:
        with LeanQClient(settings) as lean:
            yield {"a thread": in_threads(lean), "a loop": lean.amap, "asyncio": other.amap}


@pytest.fixture(params=["a thread", pytest.param("a loop", marks=pytest.mark.slow), "asyncio"])
def stream(streams: dict[str, Stream], request: pytest.FixtureRequest) -> Stream:
    """``map`` or ``amap`` of each kind of client."""
    return streams[request.param]


@pytest.fixture(params=["a loop", "asyncio"])
def amap(streams: dict[str, Stream], request: pytest.FixtureRequest) -> Stream:
    """``amap`` of each kind of client."""
    return streams[request.param]


async def drained(queue: Queue) -> bool:
    return not (await queue.status()).priorities


async def all_of(results: AsyncGenerator[Result, None]) -> list[Result]:
    async with asyncio.timeout(60):
        return [result async for result in results]


async def test_results_come_in_the_order_of_the_codes(stream: Stream, checker: Checker) -> None:
    codes = ["held", *map(str, range(40))]

    async def let_go() -> None:
        await eventually(lambda: len(checker.ended) == 40)
        checker.let_go()

    results, _ = await asyncio.gather(all_of(stream(codes)), let_go())
    assert checker.ended[-1] == "held"
    assert [(result.index, result.code) for result in results] == list(enumerate(codes))
    assert {result.verdict for result in results} == {"accepted"}
    assert not any(result.error for result in results)


async def test_or_as_they_finish(stream: Stream, checker: Checker) -> None:
    codes = ["held", *map(str, range(40))]
    async with aclosing(stream(codes, ordered=False)) as results:
        early = [await anext(results) for _ in range(40)]
        assert {result.code for result in early} == set(codes) - {"held"}
        checker.let_go()
        last = await anext(results)
        assert (last.index, last.code) == (0, "held")
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_no_codes_are_no_results(stream: Stream) -> None:
    assert await all_of(stream([])) == []


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [1, 7, 64])
async def test_codes_are_read_as_they_are_needed(
    stream: Stream, checker: Checker, window: int, ordered: bool
) -> None:
    read = given = 0

    def codes() -> Iterator[str]:
        nonlocal read
        for number in itertools.count():
            read += 1
            assert read <= given + window
            yield str(number)

    endless = stream(codes(), window=window, ordered=ordered)
    assert read == 0
    async with aclosing(endless) as results:
        async for _ in results:
            given += 1
            if given == 100:
                break
    assert given <= read <= given + window


async def test_what_finished_early_waits_and_nothing_more_is_read(
    stream: Stream, checker: Checker
) -> None:
    read: list[str] = []

    def codes() -> Iterator[str]:
        for code in ("held", *map(str, range(30))):
            read.append(code)
            yield code

    task = asyncio.create_task(all_of(stream(codes(), window=8)))
    await eventually(lambda: len(checker.ended) == 7)
    assert len(read) == 8
    checker.let_go()
    assert [result.code for result in await task] == read
    assert len(read) == 31


@pytest.mark.slow
async def test_what_was_given_out_is_kept_nowhere(stream: Stream, checker: Checker) -> None:
    class Code(str):
        """A string that can be watched."""

    alive: weakref.WeakSet[Code] = weakref.WeakSet()
    most = 0

    def codes() -> Iterator[str]:
        nonlocal most
        for number in range(600):
            code = Code(number)
            alive.add(code)
            most = max(most, len(alive))
            yield code

    async for result in stream(codes(), window=16):
        assert result.verdict == "accepted"
    assert 0 < most < 16 + 8


async def test_what_is_wrong_with_one_code_is_its_result(stream: Stream, checker: Checker) -> None:
    wrong: dict[object, type[Exception]] = {
        "": InvalidRequestError,
        "nul \0": InvalidRequestError,
        "surrogate \ud800": InvalidRequestError,
        5: InvalidRequestError,
        b"bytes": InvalidRequestError,
        None: InvalidRequestError,
        "x" * (MAX_REQUEST_BYTES + 1): TooLargeError,
        "broken": RequestError,
    }
    codes = ["good", *wrong, "good as well"]
    first, *faults, last = await all_of(stream(codes))
    assert (first.verdict, last.verdict) == ("accepted", "accepted")
    assert [type(fault.error) for fault in faults] == list(wrong.values())
    assert {(fault.reply, fault.verdict) for fault in faults} == {(None, None)}
    assert "bytes" in str(faults[4].error)
    (unknown,) = await all_of(stream(["x"], env="elsewhere"))
    assert isinstance(unknown.error, UnknownEnvironmentError)


async def test_what_is_wrong_with_all_is_an_error_at_once(settings: Settings, queue: Queue) -> None:
    read: list[str] = []

    def codes() -> Iterator[str]:
        read.append("x")
        yield "x"

    wrong: list[tuple[str, dict[str, Any]]] = [
        ("unexpected option 'timeout'", {"timeout": 5}),
        ("priority must be", {"priority": 3}),
        ("tenant 'a b'", {"tenant": "a b"}),
        ("environment ''", {"env": ""}),
        ("timeout .*-1", {"timeout_s": -1}),
        ("a request id names one", {"request_id": "0-one"}),
        ("window must be at least 1", {"window": 0}),
        ("allow_axioms must be a list of texts, got 'ax'", {"allow_axioms": "ax"}),
        ("single text", {"codes": "theorem"}),
        ("single text", {"codes": b"theorem"}),
        ("codes must be an iterable of texts, got 5", {"codes": 5}),
    ]
    async with AsyncLeanQClient(settings) as other:
        with LeanQClient(settings) as lean:
            for stream in (lean.map, lean.amap, other.amap):
                for text, options in wrong:
                    with pytest.raises((UsageError, TypeError), match=text):
                        stream(**{"codes": codes(), **options})
    assert not read
    assert "submitted" not in (await queue.status()).counters


async def test_options_are_for_all_codes(stream: Stream, checker: Checker) -> None:
    results = await all_of(stream(["a", "b"], allow_axioms=iter(["one", "two"]), request_id=None))
    assert [result.reply.axioms for result in results if result.reply] == [("one", "two")] * 2


@pytest.mark.parametrize("ordered", [True, False])
async def test_leaving_early_withdraws(
    stream: Stream, checker: Checker, queue: Queue, ordered: bool
) -> None:
    def codes() -> Iterator[str]:
        yield "first"
        for number in itertools.count():
            yield f"held {number}"

    async for result in stream(codes(), window=100, ordered=ordered):
        assert result.code == "first"
        break
    await eventually(lambda: drained(queue))
    await eventually(lambda: not checker.running)
    assert checker.ended == ["first"]


async def test_an_exception_of_the_source_withdraws_and_is_raised(
    stream: Stream, checker: Checker, queue: Queue
) -> None:
    async def run(codes: Iterable[str]) -> None:
        with pytest.raises(ZeroDivisionError):
            await all_of(stream(codes, window=64))
        await eventually(lambda: drained(queue))
        await eventually(lambda: not checker.running)

    await run(f"held {1 // number}" for number in range(20, -1, -1))
    await run(f"held {1 // number}" for number in range(20))


def test_an_exception_of_the_user_withdraws(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    def use(results: Iterable[Result]) -> None:
        for result in results:
            raise KeyError(result.code)

    driver = Checker()
    with serving(settings, driver), LeanQClient(settings) as lean:
        with pytest.raises(KeyError):
            use(lean.map(["first", *(f"held {n}" for n in range(20))]))
        until(lambda: not look(settings).priorities and not driver.running)
        results = lean.map(["first", *(f"held {n}" for n in range(20))], window=8)
        assert next(results).code == "first"
        results.close()
        results.close()
        until(lambda: not look(settings).priorities and not driver.running)
        assert list(results) == []
    # Least of all about callbacks of futures.
    assert not [record for record in caplog.records if record.name == "concurrent.futures"]


async def test_cancelling_a_task_withdraws(amap: Stream, checker: Checker, queue: Queue) -> None:
    task = asyncio.create_task(all_of(amap(f"held {n}" for n in itertools.count())))
    await eventually(lambda: len(checker.running) == 64)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await eventually(lambda: drained(queue))
    await eventually(lambda: not checker.running)


async def test_results_come_while_the_source_waits(amap: Stream, checker: Checker) -> None:
    came = asyncio.Event()

    async def codes() -> AsyncIterator[str]:
        for code in ("first", "", "last"):
            yield code
            # The loop that asks for more has seen what became of this.
            await came.wait()
            came.clear()

    async with asyncio.timeout(30):
        seen = []
        async for result in amap(codes()):
            seen.append(result.code)
            came.set()
    assert seen == ["first", "", "last"]


async def test_a_source_that_waits_is_cancelled(amap: Stream, checker: Checker) -> None:
    ended: list[str] = []

    async def codes() -> AsyncIterator[str]:
        yield "first"
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("codes")

    async with aclosing(amap(codes())) as results:
        assert (await anext(results)).code == "first"
    assert ended == ["codes"]


async def test_an_exception_of_an_asynchronous_source(amap: Stream, checker: Checker) -> None:
    async def codes() -> AsyncIterator[str]:
        yield "held"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await all_of(amap(codes()))
    await eventually(lambda: not checker.running)


async def test_a_client_that_is_closed(settings: Settings, checker: Checker) -> None:
    lean, other = LeanQClient(settings), AsyncLeanQClient(settings)
    lean.close()
    with pytest.raises(ClosedError):
        next(lean.map(["x"]))
    for stream in (lean.amap, other.amap):
        with pytest.raises(ClosedError):
            await anext(stream(["x"]))

    async with other:
        results = other.amap(["held", "held too"])
        task = asyncio.create_task(all_of(results))
        await eventually(lambda: len(checker.running) == 2)
    assert [type(result.error) for result in await task] == [ClosedError] * 2


async def test_the_iterator_for_threads_works_in_an_event_loop(settings: Settings) -> None:
    driver = Checker()
    with serving(settings, driver), LeanQClient(settings) as lean:
        codes = [str(number) for number in range(300)]
        assert [result.code for result in lean.map(iter(codes))] == codes


def test_loops_of_several_threads_share_a_client(settings: Settings) -> None:
    def by_map(number: int) -> list[str]:
        return [result.code for result in lean.map(codes(number), window=8)]

    def by_amap(number: int) -> list[str]:
        async def run() -> list[str]:
            return [result.code async for result in lean.amap(codes(number), window=8)]

        return asyncio.run(run())

    def codes(number: int) -> list[str]:
        return [f"{number} {n}" for n in range(60)]

    with LeanQClient(settings) as lean, serving(settings, Checker()), ThreadPoolExecutor(8) as pool:
        users = [pool.submit((by_map, by_amap)[n % 2], n) for n in range(8)]
        assert [user.result(60) for user in users] == [codes(n) for n in range(8)]
