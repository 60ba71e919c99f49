"""Work on behalf of an HTTP client, for as long as it waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The HTTP client has gone before its answer was there."""


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` returns, which is cancelled once the client has gone.

    Call it when the request's body has been read.

    Raises:
        ClientGoneError: the client has gone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
