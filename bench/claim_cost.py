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
    """The server's CPU time (µs) for an empty script and for a claim, their ratio, and the time of
    the claim's script and of the commands in it."""

    empty_us: float
    claim_us: float
    ratio: float
    script_us: float
    commands_us: float


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
                await queue.call(lambda client: client.config_resetstat())
                claim_us = await _per_call_us(queue, _CALLS, lambda: fleet.claim(load.each))
                parts = await _parts_us(queue)
                rounds.append(Cost(empty_us, claim_us, claim_us / empty_us, *parts))
    return Cost(*(statistics.median(values) for values in zip(*rounds, strict=True)))


async def _empty(queue: Queue) -> None:
    await queue.call(lambda client: client.eval(_EMPTY, 1, queue.keys.tag))


async def _per_call_us(queue: Queue, calls: int, call: Callable[[], Awaitable[None]]) -> float:
    before = await look(queue)
    for _ in range(calls):
        await call()
    after = await look(queue)
    return (after.cpu_s - before.cpu_s) / calls * 1e6


async def _parts_us(queue: Queue) -> tuple[float, float]:
    """Returns the time of a claim's script, and of the commands that it calls."""
    stats = await queue.call(lambda client: client.info("commandstats"))
    spent_us = {
        name.removeprefix("cmdstat_"): each["usec"] / _CALLS
        for name, each in stats.items()
        if name not in ("cmdstat_info", "cmdstat_config|resetstat")
    }
    script_us = spent_us.pop("fcall", 0.0) + spent_us.pop("evalsha", 0.0)
    return script_us, sum(spent_us.values())


async def main() -> None:
    leave_on_sigterm()
    small = Load(workers=100, tenants=8, held=8, waiting=1000, each=1)
    loads = {
        "echo, 1 per call": small,
        "check, 1 per call": replace(small, checks=True),
        "echo, 100 per call": replace(small, held=100, each=100),
        "check, 100 per call": replace(small, held=100, each=100, checks=True),
    }
    print("| claim | empty script | claim | ratio | its script | commands in it |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, load in loads.items():
        seen = await cost(load)
        print(
            f"| {name} | {seen.empty_us:.0f} µs | {seen.claim_us:.0f} µs | {seen.ratio:.1f} "
            f"| {seen.script_us:.0f} µs | {seen.commands_us:.0f} µs |"
        )


if __name__ == "__main__":
    asyncio.run(main())
