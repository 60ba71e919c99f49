"""Tells what runs cost by the day, from the accounts to which workers add with their heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from leanq.queue.operator_queue import every_queue
from leanq.queue.results import Use
from leanq.queue.settings import Settings

DAY_S = 86_400

Account = Mapping[int, tuple[int, Mapping[Use, int]]]
"""The accounts of a shard by day: since when (ms) each was kept, and what was counted."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the runs of a day (UTC) cost. Names are ``""`` for those that have none or had no room.

    ``ended``: results by verdict, or by another word for an end without one.
    """

    day: date
    tenant: str
    environment: str
    campaign: str
    cpu_s: float = 0.0
    attempts: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of some days, the highest of a day first.

    ``since``: from when on all that workers told is counted; None if nothing ever was.
    """

    since: datetime | None
    rows: Sequence[Cost]


async def costs(settings: Settings, since_s: float) -> Costs:
    """Returns the costs of all days (UTC) that the last ``since_s`` seconds touch.

    Raises:
        UnavailableError: a shard cannot be reached.
    """
    first_day = int(max(0.0, time.time() - since_s) // DAY_S)
    async with every_queue(settings) as queues:
        accounts = await asyncio.gather(*(queue.accounts(first_day) for queue in queues))
    return costs_of(accounts, first_day)


def costs_of(shards: Iterable[Account], first_day: int) -> Costs:
    found: dict[tuple[int, str, str, str], Counter[str]] = {}
    begun_s = []
    for shard in shards:
        if shard:
            # Older days are forgotten, or were never kept.
            oldest = min(shard)
            begun_s.append(min(shard[oldest][0] / 1000, (oldest + 1) * DAY_S))
        for day, (_, uses) in shard.items():
            for use, n in uses.items():
                names = use.tenant, use.environment, use.campaign
                found.setdefault((day, *names), Counter())[use.what] += n
    rows = []
    for (day, tenant, environment, campaign), counts in sorted(found.items()):
        at = date.fromordinal(date(1970, 1, 1).toordinal() + day)
        cpu_s, attempts = counts.pop("cpu_ms", 0) / 1000, counts.pop("attempts", 0)
        names = tenant, environment, campaign
        rows.append(Cost(at, *names, cpu_s, attempts, dict(sorted(counts.items()))))
    rows.sort(key=lambda row: (row.day, -row.cpu_s))
    since_s = max((first_day * DAY_S, *begun_s)) if begun_s else None
    return Costs(None if since_s is None else datetime.fromtimestamp(since_s, UTC), rows)
