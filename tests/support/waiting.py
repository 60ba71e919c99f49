"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], deadline_s: float = 60.0
) -> None:
    """Waits until ``condition`` holds; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        assert time.monotonic() < end, f"not within {deadline_s} s: {condition}"
        await asyncio.sleep(0.01)
