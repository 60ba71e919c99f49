"""Measures the growth of server time per request with workers, tenants and requests in flight."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fleet import Fleet, Load, look
from queues import Queue
from servers import cluster

from leanq.queue.settings import Settings

_REQUESTS = 8000
_ROUNDS = 5


class Growth(NamedTuple):
    """CPU time per request of the smaller load (µs), and the larger load's ratio to it."""

    name: str
    what: str
    before_us: float
    ratio: float
    least: float
    most: float
    targeted: bool


async def growth(batch: int, nodes: int) -> list[Growth]:
    """Measures all growth at one batch size, on one server or a cluster of so many nodes."""
    one = Load(batch=batch, each=batch, held=batch)
    waiting = replace(one, waiting=20_000)
    thousand = replace(one, held=1000 * batch)
    name, small, large = f"batches of {batch}", f"{batch:,}", f"{1000 * batch:,}"
    flight = await _costs(nodes, [one, thousand, replace(thousand, workers=1000, held=batch)])
    empty = await _costs(nodes, [one, replace(one, tenants=100), replace(one, tenants=10_000)])
    lines = await _costs(nodes, [waiting, replace(waiting, tenants=10_000)])
    return [
        _growth("workers", f"1 → 1,000 workers, {large} in flight, {name}", flight[1], flight[2]),
        _growth(
            "in_flight",
            f"{small} → {large} in flight, 1 worker, {name}",
            flight[0],
            flight[1],
            targeted=False,
        ),
        _growth("tenants_100", f"1 → 100 tenants, {name}", empty[0], empty[1]),
        _growth("tenants_10000", f"1 → 10,000 tenants, {name}", empty[0], empty[2]),
        _growth(
            "tenants_10000_waiting",
            f"1 → 10,000 tenants, {name}, 20,000 waiting",
            lines[0],
            lines[1],
        ),
    ]


async def _costs(nodes: int, loads: Sequence[Load]) -> list[list[float]]:
    """Returns the CPU time per request (µs) of each load in each round.

    Each load has servers of its own; the loads take turns.
    """
    async with contextlib.AsyncExitStack() as stack:
        queues: list[Queue] = []
        fleets: list[Fleet] = []
        for load in loads:
            queues.append(Queue(Settings(stack.enter_context(cluster(nodes))[0])))
            stack.push_async_callback(queues[-1].close)
            fleets.append(Fleet(queues[-1], load))
            await fleets[-1].open(beside=fleets[:-1])
        costs: list[list[float]] = [[] for _ in loads]
        turns = _REQUESTS // loads[0].batch
        places = list(range(len(loads)))
        for number in range(_ROUNDS + 1):
            for place in places if number % 2 else places[::-1]:
                before = await look(queues[place])
                for _ in range(turns):
                    for fleet in fleets:
                        await fleet.renew()
                    await fleets[place].turn()
                after = await look(queues[place])
                # The first round warms up.
                if number:
                    used_us = (after.cpu_s - before.cpu_s) * 1e6
                    costs[place].append(used_us / (turns * loads[place].batch))
        return costs


def _growth(
    name: str, what: str, before: Sequence[float], after: Sequence[float], *, targeted: bool = True
) -> Growth:
    ratios = [more / less for less, more in zip(before, after, strict=True)]
    middle = statistics.median
    return Growth(name, what, middle(before), middle(ratios), min(ratios), max(ratios), targeted)
