"""Runs work on behalf of an HTTP client for as long as the client waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import HTTPException, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leanq.queue.metrics import count

log = logging.getLogger("leanq.gateway")

_T = TypeVar("_T")

# A body may take this time, and a second more for so many bytes.
_BODY_S = 20.0
_BODY_BYTES_PER_S = 65_536

CLIENT_GONE = 499
"""The status of a request whose client did not wait for its answer, as in nginx."""


class ClientGoneError(Exception):
    """The HTTP client has gone before its answer was ready."""


async def client_gone(request: Request, __: Exception) -> Response:
    """Returns the answer that no client hears, for logs and metrics."""
    log.debug("the client of %s %s has gone", request.method, request.url.path)
    return Response(status_code=CLIENT_GONE)


class Ending(asyncio.Event):
    """Set once the gateway ends and waits for no more requests."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: set[Callable[[], None]] = set()

    def set(self) -> None:
        super().set()
        for callback in list(self._callbacks):
            callback()

    def add(self, callback: Callable[[], None]) -> None:
        """Calls it when the gateway ends; at once if it has ended."""
        self._callbacks.add(callback)
        if self.is_set():
            callback()

    def discard(self, callback: Callable[[], None]) -> None:
        self._callbacks.discard(callback)


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Returns the result of ``work``; cancels it if the client goes away or the gateway ends.

    Call it when the request's body has been read. Raises ClientGoneError, and HTTPException
    (503) if the gateway ends.
    """
    task = asyncio.current_task()
    assert task
    cancelled_before = task.cancelling()
    causes: list[Exception] = []

    def stop(cause: Exception) -> None:
        if not causes:
            causes.append(cause)
            task.cancel()

    def end() -> None:
        stop(HTTPException(503, "the gateway ends; send it again", {"Retry-After": "1"}))

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stop(ClientGoneError())

    ending: Ending = request.app.state.ending
    # Use a single task here, since every request passes through.
    watching = asyncio.create_task(watch())
    ending.add(end)
    try:
        return await work
    except asyncio.CancelledError:
        if causes and task.uncancel() <= cancelled_before:
            raise causes[0] from None
        raise
    finally:
        ending.discard(end)
        watching.cancel()


class Timely:
    """Refuses a request whose body comes too slowly, but for those at the paths ``streamed``."""

    def __init__(self, app: ASGIApp, streamed: frozenset[str]) -> None:
        self._app = app
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._streamed:
            await self._app(scope, receive, send)
            return
        due_s, is_whole = asyncio.get_running_loop().time() + _BODY_S, False

        async def timed() -> Message:
            nonlocal due_s, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(due_s):
                    message = await receive()
            except TimeoutError:
                count("leanq_http_refusals_total", "too slow")
                raise HTTPException(
                    408, "the body comes too slowly", {"Connection": "close"}
                ) from None
            due_s += len(message.get("body", b"")) / _BODY_BYTES_PER_S
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, timed, send)
