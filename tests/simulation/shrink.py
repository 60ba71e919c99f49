"""A history that fails, made smaller: fewer failures, then fewer requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from simulation.plan import Plan

_T = TypeVar("_T")


def shrunk(plan: Plan, fails: Callable[[Plan], bool], within_s: float = 60.0) -> Plan:
    """The smallest part of a plan found in so many seconds that still fails."""
    end_s = time.perf_counter() + within_s

    def may_go_on() -> bool:
        return time.perf_counter() < end_s

    failures = _fewer(plan.failures, lambda f: fails(plan.part(plan.asks, f)), may_go_on)
    plan = plan.part(plan.asks, failures)
    asks = _fewer(plan.asks, lambda a: fails(plan.part(a, plan.failures)), may_go_on)
    return plan.part(asks, failures)


def _fewer(
    items: Sequence[_T], fails: Callable[[Sequence[_T]], bool], may_go_on: Callable[[], bool]
) -> Sequence[_T]:
    """Delta debugging: leaves out ever smaller pieces, as long as it fails without them."""
    size = max(1, len(items) // 2)
    while items:
        start, smaller = 0, False
        while start < len(items) and may_go_on():
            rest = [*items[:start], *items[start + size :]]
            if fails(rest):
                items, smaller = rest, True
            else:
                start += size
        if not may_go_on() or (size == 1 and not smaller):
            break
        size = max(1, size // 2)
    return items
