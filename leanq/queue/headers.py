"""Which headers texts had, as workers tell the fleet with their heartbeats."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

MOST_BYTES = 4096
"""A longer header is known to no worker but those that have served it."""

MOST_PRELOADED = 16
LEAST_TEXTS = 10
"""What a worker that starts asks for: at most so many headers, each with so many texts lately."""

# The first rows of one heartbeat go with it, so that no caller's headers make it long.
_MOST_ROWS = 32
_MOST_TENANTS, _MOST_HEADERS = 64, 16


class HeaderUse(NamedTuple):
    """How many texts of a tenant had a header, in the environment with a fingerprint."""

    fingerprint: str
    tenant: str
    header: str
    n: int


class HeadersUsed:
    """The headers of the texts that a worker has served since its last heartbeat: as many as the
    server would count of each tenant."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counter[str]] = {}

    def add(self, fingerprint: str, tenant: str, header: str) -> None:
        whose = fingerprint, tenant
        if whose not in self._counts and len(self._counts) >= _MOST_TENANTS:
            return
        counts = self._counts.setdefault(whose, Counter())
        if header in counts or len(counts) < _MOST_HEADERS:
            counts[header] += len(header.encode()) <= MOST_BYTES

    def take(self) -> list[HeaderUse]:
        """Returns what has come, each tenant's most used headers first, and forgets it."""
        taken, self._counts = self._counts, {}
        ranked = [
            (rank, HeaderUse(*whose, header, n))
            for whose, counts in taken.items()
            for rank, (header, n) in enumerate(counts.most_common())
            if n
        ]
        ranked.sort(key=lambda row: row[0])
        return [use for _, use in ranked[:_MOST_ROWS]]
