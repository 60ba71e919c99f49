"""Prints leanq's own figures beside raw ping-pong in one line of JSON; see README.md.

Takes less than a minute, and needs only leanq with its development dependencies.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace

from load import Plan
from runner import leave_on_sigterm, measure

_PLAN = Plan(one_s=2.0, many_s=3.0)
_FLOOR = replace(_PLAN, many=0, large=0)
_ROUNDS = 3
_FIGURES = (
    *("p50_ms", "p99_ms", "rps", "rps_64k", "server_us_per_request", "commands_per_request"),
    "floor_p50_ms",
)


def main() -> None:
    leave_on_sigterm()
    rounds = []
    for _ in range(_ROUNDS):
        floor, leanq = measure("floor", _FLOOR), measure("leanq", _PLAN)
        if failed := floor.failed or leanq.failed:
            sys.exit(failed)
        rounds.append({**leanq.figures, "floor_p50_ms": floor.figures["p50_ms"]})
    medians = {name: statistics.median(figures[name] for figures in rounds) for name in _FIGURES}
    print(json.dumps({name: round(value, 3) for name, value in medians.items()}))


if __name__ == "__main__":
    main()
