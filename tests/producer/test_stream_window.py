"""What a stream reads and gives out, and when, with requests that end when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from support.waiting import eventually

from leanq.producer.future_client import FutureClient, LeanQFuture
from leanq.producer.request_builder import PreparedRequest, RequestBuilder
from leanq.queue.requests import Message, Reply
from leanq.queue.settings import Settings


class Answers(FutureClient):
    """Ends what it is asked when it is told to."""

    def __init__(self) -> None:
        self._builder = RequestBuilder(Settings(url="unix:///-"), "t")
        self._begun = None
        self.futures: list[LeanQFuture[Any]] = []

    def _start(self, prepared: PreparedRequest[Any]) -> LeanQFuture[Any]:
        self.futures.append(LeanQFuture(prepared.submission.request_id))
        return self.futures[-1]


def test_a_loop_that_is_closed_amid_the_iteration(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    results = answers.amap(["first", "second"])

    async def first() -> None:
        task = asyncio.ensure_future(anext(results))
        await eventually(lambda: len(answers.futures) == 2)
        answers.futures[0].set_result(Reply("accepted"))
        await task

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    loop.close()
    answers.futures[1].set_result(Reply("accepted"))
    assert not caplog.records


def test_a_slow_source_holds_back_little_and_the_fleet_keeps_its_work() -> None:
    answers = Answers()
    given = 0
    seen: list[int] = []

    def codes() -> Iterator[str]:
        for number in range(20):
            seen.append(given)
            if number == 10:
                for future in answers.futures:
                    future.set_result(Reply("accepted"))
            yield str(number)
        answers.futures[-1].set_result(Reply("accepted"))

    results = answers.map(codes())
    for _ in range(10):
        next(results)
        given += 1
    # Nothing until they ended; then two for each that is read.
    assert seen == [0] * 11 + [2, 4, 6, 8]
    results.close()
    assert [future.cancelled() for future in answers.futures] == [False] * 10 + [True] * 5


def test_a_fault_that_is_no_codes_error_is_raised() -> None:
    answers = Answers()

    def codes() -> Iterator[str]:
        yield "x"
        answers.futures[0].set_exception(ZeroDivisionError())
        yield "y"

    with pytest.raises(ZeroDivisionError):
        list(answers.map(codes()))
    assert answers.futures[1].cancelled()


async def test_who_uses_results_without_waiting_does_not_stop_the_reader() -> None:
    answers = Answers()
    read = 0

    def codes() -> Iterator[str]:
        nonlocal read
        for number in range(100):
            read += 1
            yield str(number)

    results = answers.amap(codes(), window=10)
    first = asyncio.ensure_future(anext(results))
    await eventually(lambda: len(answers.futures) == 10)
    for future in answers.futures:
        future.set_result(Reply("accepted"))
    await first
    for _ in range(9):
        await anext(results)
    assert read >= 15
    await results.aclose()


async def test_reading_leaves_the_loop_to_others() -> None:
    turns: list[int] = []
    seen: list[int] = []

    def codes() -> Iterator[str]:
        for number in range(5):
            seen.append(len(turns))
            asyncio.get_running_loop().call_soon(turns.append, number)
            yield str(number)

    answers = Answers()
    results = answers.amap(codes())
    first = asyncio.ensure_future(anext(results))
    await eventually(lambda: len(answers.futures) == 5)
    assert seen == [0, 1, 2, 3, 4]
    answers.futures[0].set_result(Reply("accepted"))
    await first
    await results.aclose()


MISSING = Reply(
    "rejected",
    (Message("error", 1, 0, "unknown module prefix 'Mathlib'\nsearched in /nowhere"),),
    reason="unknown_import",
)
UNJUDGED = Reply(
    "unjudged",
    (Message("warning", 1, 0, "it is deprecated"), Message("warning", 1, 0, "leanq: no kernel")),
    reason="judge_unavailable",
)
SAID = {
    "have an import that the environment does not have (environment 'mathlib'): "
    "unknown module prefix 'Mathlib'": MISSING,
    "cannot be judged, since the worker has no judge that works (environment 'mathlib'): "
    "no kernel": UNJUDGED,
    "import a library that the environment's Lean cannot read (environment 'mathlib'): no kernel": (
        replace(UNJUDGED, reason="library_unreadable")
    ),
}


@pytest.mark.parametrize("text", SAID)
@pytest.mark.parametrize(("unknown", "warnings"), [(8, 1), (5, 1), (4, 0), (0, 0)])
def test_a_batch_that_fails_for_its_environment_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, unknown: int, warnings: int, text: str
) -> None:
    answers, missing = Answers(), SAID[text]

    def codes() -> Iterator[str]:
        for number in range(8):
            yield str(number)
            answers.futures[-1].set_result(missing if number < unknown else Reply("accepted"))

    results = list(answers.map(codes(), env="mathlib", ordered=False))
    assert len(results) == 8
    logged = [record.getMessage() for record in caplog.records]
    assert logged == warnings * [f"{unknown} of 8 results so far {text}"]
