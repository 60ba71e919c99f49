"""Measures what one claim costs the server, as a ratio to an empty script; see README.md.

A claim settles as many requests as it claims. Both calls go over the same connection, in turns, so
other work on the machine weighs on both alike.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from fleet import Fleet, Load, look
from queues import Queue
from runner import leave_on_sigterm
from servers import server

from leanq.queue.settings import Settings

# Rounds are short, so that other work on the machine weighs on both calls of a round alike.
_ROUNDS, _CALLS = 100, 25
_EMPTY = "return 1"


class Cost(NamedTuple):
    """The server's CPU time (µs) for an empty script and for a claim, and their ratio."""

    empty_us: float
    claim_us: float
    ratio: float


async def cost(load: Load) -> Cost:
    """Returns medians over rounds of calls by a fleet under ``load``."""
    with server() as url:
        async with Queue.every(Settings(url)) as (queue,):
            fleet = Fleet(queue, load)
            await fleet.open()
            rounds = []
            for _ in range(_ROUNDS if load.each == 1 else _ROUNDS // 5):
                await fleet.submit(_CALLS * load.each)
                empty_us = await _per_call_us(queue, _CALLS, lambda: _empty(queue))
                claim_us = await _per_call_us(queue, _CALLS, lambda: fleet.claim(load.each))
                rounds.append(Cost(empty_us, claim_us, claim_us / empty_us))
    return Cost(*(statistics.median(values) for values in zip(*rounds, strict=True)))


async def _empty(queue: Queue) -> None:
    await queue.call(lambda client: client.eval(_EMPTY, 1, queue.keys.tag))


async def _per_call_us(queue: Queue, calls: int, call: Callable[[], Awaitable[None]]) -> float:
    before = await look(queue)
    for _ in range(calls):
        await call()
    after = await look(queue)
    return (after.cpu_s - before.cpu_s) / calls * 1e6


async def main() -> None:
    leave_on_sigterm()
    small = Load(workers=100, tenants=8, held=8, waiting=1000, each=1)
    loads = {
        "echo, 1 per call": small,
        "check, 1 per call": replace(small, checks=True),
        "echo, 100 per call": replace(small, held=100, each=100),
        "check, 100 per call": replace(small, held=100, each=100, checks=True),
    }
    print("| claim | empty script | claim | ratio |\n| --- | --- | --- | --- |")
    for name, load in loads.items():
        seen = await cost(load)
        print(f"| {name} | {seen.empty_us:.0f} µs | {seen.claim_us:.0f} µs | {seen.ratio:.1f} |")


if __name__ == "__main__":
    asyncio.run(main())
