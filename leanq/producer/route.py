"""The path of a client's requests: a waiter for each, a route for all, and the tasks of a route."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from msgspec import Struct

from leanq.errors import ClosedError, LeanQError
from leanq.producer.request_builder import PreparedRequest
from leanq.queue.requests import Reply

WhenFull = Literal["wait", "raise"]
"""A submit that meets a full queue tries again later, or ends with QueueFullError."""

NoWorker = Literal["warn", "wait", "raise"]
"""A client whose requests wait for an environment without a living worker warns and waits, waits in
silence, or ends them with NoWorkerError."""


@dataclass(frozen=True)
class ClientTimings:
    """A client's intervals and time limits, in seconds.

    Attributes:
        block_s: one blocking read of the inbox.
        silence_s: silence after which the client asks the server for a request; doubled each time,
            up to a minute.
        slow_submit_s: a submit without an answer, before its cluster is probed.
        probe_s: an answer to a probe of a cluster.
        no_worker_s: without any reply from an environment, before its workers are counted.
        close_s: the last calls of a client that is closed.
    """

    block_s: float = 5.0
    silence_s: float = 5.0
    slow_submit_s: float = 2.0
    probe_s: float = 3.0
    no_worker_s: float = 5.0
    close_s: float = 10.0


@dataclass(frozen=True)
class RouteOptions:
    """A client's choices for its way to the queue, see ``leanq.LeanQClient``.

    ``shares_ends``: whether the client still hears of a request's end after another client attaches
    to the request.
    """

    when_full: WhenFull = "wait"
    unavailable_timeout_s: float = 120.0
    no_worker: NoWorker = "warn"
    timings: ClientTimings = ClientTimings()
    shares_ends: bool = False


class Waiter(Protocol):
    """Waits for the end of one request; called in the event loop of its route."""

    def acknowledged(self) -> None:
        """Notes that the queue has taken the request in; may be called several times, or never."""

    def ended(self, end: Reply | LeanQError) -> None:
        """Takes the end of the request; called once, unless the request was cancelled before."""


class CallingBack(Struct, eq=False):
    """A waiter that calls functions."""

    ended: Callable[[Reply | LeanQError], None]
    acknowledged: Callable[[], None] = lambda: None


class Route(Protocol):
    """Carries a client's requests. All methods are called in one event loop."""

    async def open(self) -> None:
        """Opens the route; raises UnavailableError when no server answers."""

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        """Submits a request."""

    def attach(self, request_id: str, waiter: Waiter) -> None:
        """Waits for a request that was submitted before."""

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        """Withdraws a request; returns False if it has ended already."""

    async def close(self, *, withdraw: bool) -> None:
        """Ends every outstanding request; ``withdraw`` also withdraws them from the queue."""


class RouteTasks:
    """Runs tasks until they end or their route is closed.

    When a task has raised, ``on_fault`` gets a function that makes an error. It has to end the
    outstanding requests with that, which would otherwise hang.
    """

    def __init__(self, on_fault: Callable[[Callable[[], LeanQError]], None]) -> None:
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()):
            self._on_fault(partial(failed, fault))


class TaskRoute(ABC):
    """The common part of routes that answer each request by a task in this process.

    ``closed``: what an outstanding request is told when the route closes.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self._tasks: dict[Waiter, asyncio.Task[None]] = {}
        # The callers of these requests know already that they have ended.
        self._withdrawn: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def answer(self, prepared: PreparedRequest[Any], waiter: Waiter) -> Reply:
        """Returns the reply to a request, or raises its error."""

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(prepared, waiter))
        self._tasks[waiter] = task
        task.add_done_callback(lambda _: self._tasks.pop(waiter, None))

    async def _serve(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        end: Reply | LeanQError
        try:
            end = await self.answer(prepared, waiter)
        except LeanQError as error:
            end = error
        except Exception as fault:
            end = failed(fault)
        waiter.ended(end)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        task = self._tasks.pop(waiter, None)
        if task is None or not task.cancel():
            return False
        self._withdrawn.add(task)
        task.add_done_callback(self._withdrawn.discard)
        return True

    async def close(self, *, withdraw: bool) -> None:
        outstanding = dict(self._tasks)
        for task in outstanding.values():
            task.cancel()
        await asyncio.gather(*outstanding.values(), *self._withdrawn, return_exceptions=True)
        for waiter, task in outstanding.items():
            if task.cancelled():
                waiter.ended(ClosedError(self._closed))


def failed(fault: BaseException) -> LeanQError:
    """Returns the error that ends a request because leanq itself has a defect."""
    text = " ".join(str(fault).split())
    error = LeanQError(f"the client failed: {type(fault).__name__}: {text}")
    error.__cause__ = fault
    return error
