"""Runs the tasks of a route, its loops and its calls, so that none of them fails unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from leanq.errors import LeanQError


class RouteTasks:
    """Runs tasks until they end or their route is closed.

    Args:
        on_fault: called when a task has raised, with a function that makes an error. That error
            ends the outstanding requests, which would otherwise hang.
    """

    def __init__(self, on_fault: Callable[[Callable[[], LeanQError]], None]) -> None:
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """Cancels all tasks, and returns when they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()):
            self._on_fault(partial(failed, fault))


def failed(fault: BaseException) -> LeanQError:
    """Returns the error that ends a request because leanq itself has a defect."""
    text = " ".join(str(fault).split())
    error = LeanQError(f"the client failed: {type(fault).__name__}: {text}")
    error.__cause__ = fault
    return error
