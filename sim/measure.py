"""Computes the figures of a run, and their intervals over many seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

from sim.parts import Outcome
from sim.scenarios import Scenario

_RESAMPLES = 2000

Figures = dict[str, float | None]
"""By name: ``p50_s``, ``p99_s`` of the waits, ``clear_s``, ``cost`` (workers' slot seconds over
those of pure work), ``cpu_h``, ``utilization`` in percent, ``reversals_per_h``, ``lost`` and
``left`` requests, ``most_workers``."""


class Interval(NamedTuple):
    """A mean and its confidence interval of 95 %."""

    mean: float
    low: float
    high: float


def figures(scenario: Scenario, outcome: Outcome) -> Figures:
    waits = outcome.waits_s
    work_s = max(outcome.work_s, 1e-9)
    return {
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[len(waits) * 99 // 100],
        "clear_s": outcome.clear_s,
        "cost": outcome.slot_s / work_s,
        "cpu_h": outcome.slot_s * scenario.bundle / 3600,
        "utilization": 100 * outcome.work_s / outcome.slot_s,
        "reversals_per_h": outcome.reversals * 3600 / scenario.until_s,
        "lost": outcome.lost,
        "left": outcome.left,
        "most_workers": outcome.most_workers,
    }


def known(runs: Sequence[Figures], name: str) -> list[float]:
    """Returns the figure of all runs; empty if one of them lacks it."""
    values = [run[name] for run in runs]
    return [value for value in values if value is not None] if None not in values else []


def interval(values: Sequence[float]) -> Interval:
    """Returns the bootstrap interval, with its own seed, so that it is always the same."""
    chance = Random("bootstrap")
    means = sorted(fmean(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Interval(fmean(values), means[_RESAMPLES // 40], means[-_RESAMPLES // 40 - 1])


def difference(ours: Sequence[Figures], theirs: Sequence[Figures], name: str) -> Interval:
    """Returns the interval of the difference, seed by seed; both runs must have the figure."""
    pairs = zip(known(ours, name), known(theirs, name), strict=True)
    return interval([our - their for our, their in pairs])


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
