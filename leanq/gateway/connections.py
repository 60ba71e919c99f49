"""Work on behalf of an HTTP client, for as long as it waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response

log = logging.getLogger("leanq.gateway")

_T = TypeVar("_T")

CLIENT_GONE = 499
"""The status, known from nginx, of a request whose client did not wait for its answer."""


class ClientGoneError(Exception):
    """The HTTP client has gone before its answer was there."""


async def client_gone(request: Request, __: Exception) -> Response:
    """The answer that no client hears, for logs and metrics."""
    log.debug("the client of %s %s has gone", request.method, request.url.path)
    return Response(status_code=CLIENT_GONE)


class Ending(asyncio.Event):
    """Set once the gateway ends, and no request is waited for any more."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: set[Callable[[], None]] = set()

    def set(self) -> None:
        super().set()
        for callback in list(self._callbacks):
            callback()

    def add(self, callback: Callable[[], None]) -> None:
        """Has it called when the gateway ends, which is now where it has."""
        self._callbacks.add(callback)
        if self.is_set():
            callback()

    def discard(self, callback: Callable[[], None]) -> None:
        """Has it called no more."""
        self._callbacks.discard(callback)


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` returns, which is cancelled once the client has gone, or the gateway ends.

    Call it when the request's body has been read.

    Raises:
        ClientGoneError: the client has gone.
        HTTPException: 503, the gateway ends.
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
    # One task and no more, since there is one for each request.
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
