"""Looks at the queue at most once a second, however many callers ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

FRESH_S = 1.0


class Fresh(Generic[_T]):
    """The result of ``look``, at most a second old."""

    def __init__(self, look: Callable[[], Awaitable[_T]]) -> None:
        self._look = look
        self._looking = asyncio.Lock()
        self._seen: tuple[float, _T] | None = None

    async def get(self) -> _T:
        async with self._looking:
            now_s = time.monotonic()
            if self._seen is None or now_s - self._seen[0] > FRESH_S:
                self._seen = now_s, await self._look()
            return self._seen[1]
