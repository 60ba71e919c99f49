"""Work that a cancellation must not cut short, and work for another thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_apart(work: Callable[..., _T], *args: Any, at_once: bool) -> _T:
    """Returns what ``work`` returns: in another thread, or ``at_once`` if it is short."""
    return work(*args) if at_once else await asyncio.to_thread(work, *args)


async def to_its_end(work: Awaitable[_T]) -> _T:
    """Awaits ``work`` to its end, and only then raises a cancellation that came meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # or the loop would report an exception that nobody retrieved
        raise
