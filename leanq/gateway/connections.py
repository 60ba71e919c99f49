"""Work on behalf of an HTTP client, for as long as it waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The HTTP client has gone before its answer was there."""


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` returns, which is cancelled once the client has gone, or the gateway ends.

    Call it when the request's body has been read.

    Raises:
        ClientGoneError: the client has gone.
        HTTPException: 503, the gateway ends.
    """
    ending: asyncio.Event = request.app.state.ending
    working = asyncio.ensure_future(work)
    gone, over = asyncio.ensure_future(_until_gone(request)), asyncio.ensure_future(ending.wait())
    tasks = (working, gone, over)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            raise ClientGoneError
        raise HTTPException(503, "the gateway ends; send it again", {"Retry-After": "1"})
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
