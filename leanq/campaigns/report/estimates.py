"""Estimates with their 95% intervals; deterministic, without resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_Z = 1.959964
"""95% of a normal distribution lie within so many standard errors."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its 95% interval."""

    estimate: float
    low: float
    high: float


def pass_at_k(samples: int, accepted: int, k: int) -> float:
    """Returns the chance that ``k`` samples, drawn without replacement, include an accepted one.

    This is 1 - C(n-c, k) / C(n, k), with n ``samples`` and c ``accepted``. It is unbiased for k
    fresh samples (Chen et al., 2021). Needs 1 ≤ k ≤ samples and 0 ≤ accepted ≤ samples.
    """
    if samples - accepted < k:
        return 1.0
    # C(n-c, k) / C(n, k) = C(n-k, c) / C(n, c): the shorter product serves. Logarithms keep the
    # digits of a tiny chance, where 1 - product loses them.
    factors, part = sorted((accepted, k))
    return -math.expm1(math.fsum(math.log1p(-part / (samples - i)) for i in range(factors)))


def mean_of_shares(counts: Mapping[float, int]) -> Interval | None:
    """Returns the mean of values in [0, 1], given as value → how often; ``None`` without values.

    The interval is Wilson's score interval for the number of trials that would spread a share of
    successes as far as these values. It is Wilson's own if all values are 0 or 1, and never leaves
    [0, 1]. A few equal values do not show how far values can spread, so one value of the largest
    spread is added.
    """
    number = sum(counts.values())
    if not number:
        return None
    mean = min(1.0, math.fsum(each * n for each, n in counts.items()) / number)
    most = mean * (1 - mean)
    squares = math.fsum(n * (each - mean) ** 2 for each, n in counts.items())
    variance = (squares + most) / (number + 1)
    trials = max(number, number * most / variance) if variance else number
    spread = _Z * _Z / trials
    centre = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (most + spread / 4)) / (1 + spread)
    # Rounding must not push the estimate out of its interval.
    return Interval(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest value that a ``share`` of ``ordered`` (ascending, not empty) does not
    exceed. It is always one of the values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
