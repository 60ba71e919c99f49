"""Work that a cancellation must not cut short."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


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
