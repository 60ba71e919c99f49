"""The tasks of a route: what fails is told, and what is cancelled has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.waiting import eventually

from leanq.errors import LeanQError
from leanq.producer.route import RouteTasks


async def test_a_task_that_raises_is_told_as_an_error_that_names_it() -> None:
    faults: list[Callable[[], LeanQError]] = []
    tasks = RouteTasks(faults.append)

    async def fail() -> None:
        raise ZeroDivisionError("by\n zero")

    async def end() -> None:
        pass

    tasks.spawn(end())
    tasks.spawn(fail())
    await eventually(lambda: len(faults) == 1)
    one, other = faults[0](), faults[0]()
    assert str(one) == "the client failed: ZeroDivisionError: by zero"
    assert isinstance(one.__cause__, ZeroDivisionError)
    # Raising an error adds to its traceback, so each request gets its own.
    assert one is not other


async def test_tasks_that_are_cancelled_have_ended_and_are_no_fault() -> None:
    faults: list[Callable[[], LeanQError]] = []
    ended: list[int] = []
    started = asyncio.Semaphore(0)
    tasks = RouteTasks(faults.append)

    async def last(number: int) -> None:
        try:
            started.release()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    for number in range(3):
        tasks.spawn(last(number))
    async with asyncio.timeout(30):
        for _ in range(3):
            await started.acquire()
        await tasks.cancel()
    assert sorted(ended) == [0, 1, 2]
    assert not faults
