"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], deadline_s: float = 60.0
) -> None:
    """Waits until ``condition`` holds; fails after the deadline."""
    started = time.monotonic()
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        waited_s = time.monotonic() - started
        assert waited_s < deadline_s, f"not within {deadline_s} s: {condition}"
        # Looks cost CPU time that what is waited for may need.
        await asyncio.sleep(min(0.05, max(0.005, waited_s / 10)))
