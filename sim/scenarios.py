"""The scenarios: arrivals, preemptions and outages for the fleets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi
from random import Random

Span = tuple[float, float]
Arrivals = Iterable[tuple[float, int]]

_MIN = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario. Times are in seconds from the start.

    Attributes:
        arrivals: takes a random source; yields when and how many, in order.
        work_s: the mean for requests submitted at a given time. Work is lognormal; ``spread`` is
            its standard deviation over its mean.
        workers: there and ready at the start, with ``slots`` each.
        bundle: how many requests and slots each simulated one stands for.
        life_s: a machine's mean time until it is preempted.
        storms: times at which a share of all workers is preempted at once.
        stock_outs, outages, restarts: spans without new machines, spans without the server, and
            spans without the scaler, which forgets everything.
        mark_s: start of the time to clear, which lasts until all requests submitted before have
            ended.
    """

    name: str
    text: str
    arrivals: Callable[[Random], Arrivals]
    until_s: float
    work_s: Callable[[float], float] = lambda _: 4.0
    spread: float = 1.5
    workers: int = 1
    slots: int = 4
    bundle: int = 1
    life_s: float = 24 * 3600.0
    storms: tuple[tuple[float, float], ...] = ()
    stock_outs: tuple[Span, ...] = ()
    outages: tuple[Span, ...] = ()
    restarts: tuple[Span, ...] = ()
    mark_s: float | None = None


def poisson(
    rate: Callable[[float], float], most: float, until_s: float
) -> Callable[[Random], Arrivals]:
    """Returns single arrivals at a rate per second that changes and is never above ``most``."""

    def arrivals(chance: Random) -> Iterator[tuple[float, int]]:
        now = 0.0
        while True:
            now += chance.expovariate(most)
            if now > until_s:
                return
            if chance.random() * most < rate(now):
                yield now, 1

    return arrivals


def bursts(times: Iterable[float], count: int) -> Callable[[Random], Arrivals]:
    """Returns so many arrivals together at each of the times, or up to a minute later."""

    def arrivals(chance: Random) -> Iterator[tuple[float, int]]:
        for at in times:
            yield at + 60 * chance.random(), count

    return arrivals


def both(*parts: Callable[[Random], Arrivals]) -> Callable[[Random], Arrivals]:
    def arrivals(chance: Random) -> Arrivals:
        return sorted(arrival for part in parts for arrival in part(chance))

    return arrivals


def _line(now: float, *points: tuple[float, float]) -> float:
    """Returns the value at ``now`` of straight lines through the points."""
    for (x, y), (to_x, to_y) in pairwise(points):
        if now < to_x:
            return y + (to_y - y) * max(0.0, now - x) / (to_x - x)
    return points[-1][1]


def _ramp(now: float) -> float:
    return _line(now, (10 * _MIN, 2), (30 * _MIN, 60), (40 * _MIN, 60), (55 * _MIN, 2))


STEADY = Scenario(
    "steady",
    "40/s",
    poisson(lambda _: 40, 40, 60 * _MIN),
    60 * _MIN,
    workers=45,
)
TEN = (
    Scenario(
        "burst",
        "60,000 requests of 1 s at once, on one worker",
        bursts([60.0], 60_000),
        60 * _MIN,
        work_s=lambda _: 1.0,
        spread=0.5,
        mark_s=120.0,
    ),
    Scenario(
        "ramp",
        "2/s to 60/s in 20 minutes, and back in 15",
        poisson(_ramp, 60, 75 * _MIN),
        75 * _MIN,
        workers=3,
    ),
    Scenario(
        "diurnal",
        "5/s to 45/s and back, a day in two hours",
        poisson(lambda t: 25 - 20 * cos(2 * pi * t / 7200), 45, 120 * _MIN),
        120 * _MIN,
        workers=6,
    ),
    Scenario(
        "pulses",
        "8,000 every 10 minutes, as training steps make them",
        bursts([60.0 + 600 * n for n in range(6)], 8000),
        70 * _MIN,
        mark_s=3120.0,
    ),
    Scenario(
        "storm",
        "40/s; half of all workers preempted at 20 and at 40 minutes, others every 2 hours",
        poisson(lambda _: 40, 40, 60 * _MIN),
        60 * _MIN,
        workers=45,
        life_s=2 * 3600.0,
        storms=((20 * _MIN, 0.5), (40 * _MIN, 0.5)),
        mark_s=20 * _MIN,
    ),
    Scenario(
        "heavier",
        "10/s, from 4 s each to 24 s at 15 minutes",
        poisson(lambda _: 10, 10, 75 * _MIN),
        75 * _MIN,
        work_s=lambda t: 24.0 if t > 15 * _MIN else 4.0,
        workers=12,
    ),
    Scenario(
        "long",
        "2,000 of 180 s at once, on one worker",
        bursts([60.0], 2000),
        120 * _MIN,
        work_s=lambda _: 180.0,
        spread=1.0,
        mark_s=120.0,
    ),
    Scenario(
        "stock-out",
        "20/s to 40/s at 10 minutes, with no machines to be had until 25",
        poisson(lambda t: 40 if t > 10 * _MIN else 20, 40, 75 * _MIN),
        75 * _MIN,
        workers=23,
        stock_outs=((10 * _MIN, 25 * _MIN),),
        mark_s=25 * _MIN,
    ),
    Scenario(
        "restart",
        "20/s and 6,000 more at 14 and 40 minutes; every 15 the scaler is away for one",
        both(poisson(lambda _: 20, 20, 60 * _MIN), bursts([14 * _MIN, 40 * _MIN], 6000)),
        60 * _MIN,
        workers=23,
        restarts=tuple((n * _MIN, (n + 1) * _MIN) for n in (15, 30, 45)),
        mark_s=41 * _MIN,
    ),
    Scenario(
        "outage",
        "20/s; the server is away for 3 minutes at 20",
        poisson(lambda _: 20, 20, 60 * _MIN),
        60 * _MIN,
        workers=23,
        outages=((20 * _MIN, 23 * _MIN),),
        mark_s=23 * _MIN,
    ),
)
# Each simulated request and slot stands for 16, so that a worker has 64.
HUGE = Scenario(
    "500,000 CPUs",
    "200,000 CPUs' worth, half as much again within 20 minutes, 1.6 million requests of 30 s at "
    "once at 35, and a fifth of all workers preempted at 55",
    both(
        poisson(lambda t: _line(t, (10 * _MIN, 416), (30 * _MIN, 625)), 625, 75 * _MIN),
        bursts([35 * _MIN], 100_000),
    ),
    75 * _MIN,
    work_s=lambda _: 30.0,
    spread=0.5,
    workers=3300,
    bundle=16,
    storms=((55 * _MIN, 0.2),),
    mark_s=36 * _MIN,
)
