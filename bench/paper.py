"""Computes how many workers one server carries: from measured costs, and in simulation."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from fleet import Fleet, Load, look
from queues import Queue
from servers import cluster, cpu_s

from leanq.queue.settings import Settings

SLOTS = 8
_BUSY = 0.70
_MEAN_S = (0.1, 1.0, 10.0)
_NEEDED_MEAN_S = (1.0, 10.0, 60.0)
_NEEDED_SLOTS = (8, 64)
_REQUESTS, _ROUNDS = 4000, 3
_RENEW_S = 5.0
_PARTS = 4
# One process could not renew a short lease of each worker at each of many shards.
_LONG_LEASE_S = 300.0


class Costs(NamedTuple):
    """The server's CPU time (µs) for one request and for one renewal.

    ``request_us`` is by the number of requests that a worker settles and claims with one call.
    """

    request_us: dict[int, float]
    check_us: float
    renewal_us: float


class Row(NamedTuple):
    """The load that servers carry at one mean time; connections and memory of each server."""

    mean_s: float
    shards: int
    workers: int
    slots: int
    requests_per_s: float
    connections: int
    memory_mb: float


class Simulation(NamedTuple):
    """A simulated fleet: its requests and renewals per second, and the server's share of a core.

    ``mean_s`` is the mean time of requests that this rate stands for. The share is of all servers,
    as predicted and as measured.
    """

    workers: int
    shards: int
    requests_per_s: float
    mean_s: float
    renewals_per_s: float
    predicted: float
    measured: float


async def costs(nodes: int) -> Costs:
    """Measures requests and renewals in a fleet of a tenth of the simulated size.

    It runs on one server or on a node of a cluster.
    """
    fleet = Load(workers=1000, tenants=8, held=SLOTS, waiting=1000)
    request_us = {each: await _request_us(nodes, replace(fleet, each=each)) for each in (1, 2, 8)}
    check_us = await _request_us(nodes, replace(fleet, each=1, checks=True))
    return Costs(request_us, check_us, await _renewal_us(nodes, fleet))


async def _request_us(nodes: int, load: Load) -> float:
    with cluster(nodes) as (url, *_):
        async with Queue.every(Settings(url)) as (queue,):
            fleet = Fleet(queue, load)
            await fleet.open()
            costs_us = []
            for _ in range(_ROUNDS):
                before, done = await look(queue), fleet.replies
                while fleet.replies < done + _REQUESTS:
                    await fleet.turn()
                after = await look(queue)
                costs_us.append((after.cpu_s - before.cpu_s) / (fleet.replies - done) * 1e6)
    return statistics.median(costs_us)


async def _renewal_us(nodes: int, load: Load) -> float:
    """Renews each lease in time, since rare calls cost a server more each."""
    with cluster(nodes) as (url, *_):
        async with Queue.every(Settings(url)) as (queue,):
            fleet = Fleet(queue, load)
            await fleet.open()
            before, done, until_s = await look(queue), fleet.renewals, time.monotonic() + _RENEW_S
            while time.monotonic() < until_s:
                await fleet.renew()
                await asyncio.sleep(0.001)
            after = await look(queue)
    return (after.cpu_s - before.cpu_s) / (fleet.renewals - done) * 1e6


def carried(
    request_us: float, idle_us: float, connected_bytes: float, request_bytes: float
) -> list[Row]:
    """Returns the load that one and eight shards carry, each on a server with its own core.

    ``idle_us``: a worker's cost to the server per second, by its presence. A worker is present at
    every shard, but a request is at one. ``request_bytes``: of each request in flight.
    """
    rows = []
    for mean_s in _MEAN_S:
        for shards in (1, 8):
            rate = SLOTS / mean_s
            workers = int(_BUSY * 1e6 / (rate * request_us / shards + idle_us))
            memory = workers * (connected_bytes + SLOTS * request_bytes / shards)
            row = Row(mean_s, shards, workers, SLOTS, workers * rate, 2 * workers, memory / 1e6)
            rows.append(row)
    return rows


def needed(
    cpus: int, request_us: float, idle_us: float, connected_bytes: float, request_bytes: float
) -> list[Row]:
    """Returns how many shards a fleet of so many CPUs needs, with a slot for each.

    The arguments are those of :func:`carried`. Returns no rows if the idle workers alone take a
    server's share of a core.
    """
    rows = []
    for slots in _NEEDED_SLOTS:
        workers = math.ceil(cpus / slots)
        left_us = _BUSY * 1e6 - workers * idle_us
        for mean_s in _NEEDED_MEAN_S if left_us > 0 else ():
            rate = cpus / mean_s
            shards = math.ceil(rate * request_us / left_us)
            memory = workers * (connected_bytes + slots * request_bytes / shards)
            rows.append(Row(mean_s, shards, workers, slots, rate, 2 * workers, memory / 1e6))
    return rows


async def simulate(
    costs: Costs, workers: int, seconds: float, *, nodes: int, shards: int
) -> Simulation:
    """Simulates so many workers in this process at full speed, each with all slots in use.

    At one shard they form four parts with two connections each. At several shards, each worker is
    at each shard with its share of requests, and each shard has two connections.
    """
    load = Load(tenants=8, batch=64, each=1, held=SLOTS, waiting=1000)
    with cluster(nodes) as urls:
        async with contextlib.AsyncExitStack() as stack:
            if shards == 1:
                settings, part = Settings(urls[0]), replace(load, workers=workers // _PARTS)
                each = [
                    await stack.enter_async_context(Queue.every(settings)) for _ in range(_PARTS)
                ]
                queues = [queue for (queue,) in each]
            else:
                settings = Settings(urls[0], shards=shards, lease_s=_LONG_LEASE_S)
                part = replace(load, workers=workers, held=SLOTS // shards)
                queues = await stack.enter_async_context(Queue.every(settings))
            fleets = [Fleet(queue, part, f"part-{n}") for n, queue in enumerate(queues)]
            await asyncio.gather(*(fleet.open() for fleet in fleets))
            before_s, started_s = cpu_s(urls), time.monotonic()
            done, renewed = _done(fleets)
            await asyncio.gather(*(_work(fleet, started_s + seconds) for fleet in fleets))
            took_s = time.monotonic() - started_s
            used_s = cpu_s(urls) - before_s
    now_done, now_renewed = _done(fleets)
    rate, renewals = (now_done - done) / took_s, (now_renewed - renewed) / took_s
    predicted = (rate * costs.request_us[1] + renewals * costs.renewal_us) / 1e6
    mean_s = workers * SLOTS / rate
    return Simulation(workers, shards, rate, mean_s, renewals, predicted, used_s / took_s)


async def _work(fleet: Fleet, until_s: float) -> None:
    while time.monotonic() < until_s:
        await fleet.turn()


def _done(fleets: list[Fleet]) -> tuple[int, int]:
    return sum(fleet.replies for fleet in fleets), sum(fleet.renewals for fleet in fleets)
