"""The part of the fleet's status that a key may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanq.fleet.stats import FleetStats, fingerprints_of
from leanq.gateway.keys import Key
from leanq.queue.shard import resolved
from leanq.queue.wire import info_of


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
