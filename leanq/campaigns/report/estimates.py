"""Estimates with their 95% intervals; deterministic, without resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_Z = 1.959964
"""Within so many standard errors lie 95% of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its 95% interval."""

    estimate: float
    low: float
    high: float


def pass_at_k(samples: int, accepted: int, k: int) -> float:
    """The chance that of ``k`` samples, drawn from ``samples`` without putting back, one is
    among the ``accepted``: 1 - C(n-c, k) / C(n, k), unbiased for k fresh samples (Chen et al.,
    2021). Needs 1 ≤ k ≤ samples and 0 ≤ accepted ≤ samples."""
    if samples - accepted < k:
        return 1.0
    # C(n-c, k) / C(n, k) = C(n-k, c) / C(n, c): the shorter product serves. As logarithms, so
    # that a tiny chance keeps its digits where 1 - product would lose them.
    factors, part = sorted((accepted, k))
    return -math.expm1(math.fsum(math.log1p(-part / (samples - i)) for i in range(factors)))


def mean_of_shares(counts: Mapping[float, int]) -> Interval | None:
    """The mean of values in [0, 1], given as value → how often; ``None`` where there are none.

    The interval is Wilson's score interval, with as many trials as would spread a share of
    successes as far as these values are spread. So it is Wilson's own where all values are 0 or 1,
    and never leaves [0, 1]. A few values that are about the same do not show how far values can
    spread: one more, spread as far as possible, is counted with them.
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


def mean_of_differences(counts: Mapping[float, int]) -> Interval | None:
    """The mean of paired differences in [-1, 1], given as value → how often; ``None`` without any.

    The interval is that of Bonett and Price (2012), which counts one pair more that gained and
    one that lost: honest also for few pairs, and for pairs that all agree.
    """
    number = sum(counts.values())
    if not number:
        return None
    total = math.fsum(each * n for each, n in counts.items())
    squares = math.fsum(each * each * n for each, n in counts.items())
    centre = total / (number + 2)
    half = _Z * math.sqrt(((squares + 2) / (number + 2) - centre**2) / (number + 2))
    mean = total / number
    return Interval(mean, min(mean, max(-1.0, centre - half)), max(mean, min(1.0, centre + half)))


def sign_test(rose: int, fell: int) -> float:
    """The two-sided p-value of paired problems of which so many rose and so many fell: the chance
    of a split at least as uneven where either is as likely. Exact; of problems with one sample
    each it is McNemar's test. Problems that stayed the same say nothing, and 1.0 is for none."""
    number, most = rose + fell, max(rose, fell)
    if not number:
        return 1.0
    # As logarithms, since 2 ** number is beyond a float.
    terms = (
        math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)
        for k in range(most, number + 1)
    )
    return min(1.0, 2 * math.fsum(math.exp(term - number * math.log(2)) for term in terms))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ``ordered`` (ascending, not empty) that at least ``share`` of it do not
    exceed: always a value that was measured."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
