"""The part of the fleet's status that a key may see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from leanq.fleet.stats import FleetStats, fingerprints_of, fleet_stats
from leanq.gateway.keys import Key
from leanq.queue.settings import Settings
from leanq.queue.shard import resolved
from leanq.queue.wire import info_of

_FRESH_S = 1.0


class Looks:
    """Looks at the fleet at most once a second, however many callers ask."""

    def __init__(self, clusters: Sequence[Settings]) -> None:
        self._clusters = clusters
        self._looking = asyncio.Lock()
        self._seen: tuple[float, list[FleetStats]] | None = None

    async def look(self) -> list[FleetStats]:
        """Returns each cluster, at most a second old; raises UnavailableError."""
        async with self._looking:
            now_s = time.monotonic()
            if self._seen is None or now_s - self._seen[0] > _FRESH_S:
                self._seen = now_s, [await fleet_stats(each) for each in self._clusters]
            return self._seen[1]


def environments_for(key: Key, clusters: Sequence[FleetStats]) -> list[dict[str, Any]]:
    """Returns the environments that a key may use, for each cluster."""
    found = []
    for seen in clusters:
        names = {resolved(seen.status.aliases, each, key.tenant) for each in key.environments}
        names.update(key.environments)
        found += [each for each in _environments(seen) if not names or each["name"] in names]
    return found


def _environments(seen: FleetStats) -> list[dict[str, Any]]:
    offers = [fingerprints_of(info_of(row.info)) for row in seen.status.workers if row.lease_s > 0]
    return [
        {
            "name": name,
            "lean": info_of(seen.status.environments.get(name, b"")).get("lean"),
            "fingerprint": next((each[name] for each in offers if name in each), None),
            "waiting": stats.waiting,
            "running": round(stats.running),
            "workers": round(stats.workers),
            "slots": round(stats.slots),
        }
        for name, stats in sorted(seen.environments.items())
    ]
