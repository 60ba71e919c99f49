"""Measures the queue's cost, as ratios within one run; see README.md.

One unit is a call of an empty script. Others are ping-pong by redis-py (`peers/floor.py`), and the
same bytes by plain pipelined SET and GET. With ``--before``, another checkout of leanq takes turns
with this one. Ratios of CPU time hold on a busy machine, latencies on an idle one only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import redis
from claim_cost import cost
from fleet import Load
from load import LARGE_BYTES, Plan
from runner import leave_on_sigterm, measure
from servers import cpu_s, server

_HERE = Path(__file__).resolve().parent.parent
_PLAN = Plan(one_s=2.5, many_s=3.0, count_s=0.5)
_FLOOR = replace(_PLAN, many=0, large=0)
_ALONE = Load(workers=100, tenants=8, held=8, waiting=1000, each=1)
_PLAIN_S, _PIPELINED = 1.5, 8

Figures = Mapping[str, float]


def main() -> None:
    """Prints a table; each figure is a median of rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout of leanq, to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--claims-only", action="store_true", help="only what a claim costs")
    options = parser.parse_args()
    leave_on_sigterm()
    print(f"load of the machine: {os.getloadavg()[0]:.1f}\n\n| figure | value | ratio |")
    print("| --- | --- | --- |")
    _print_claims()
    if not options.claims_only:
        _print_loads(options.before, options.rounds)
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f}")


def _print_claims() -> None:
    for name, checks in (("echo", False), ("check", True)):
        seen = asyncio.run(cost(replace(_ALONE, checks=checks)))
        value = f"{seen.claim_us:.0f} µs, empty script {seen.empty_us:.0f} µs"
        print(f"| claim of one {name} | {value} | {seen.ratio:.2f} |", flush=True)


def _print_loads(before: Path | None, rounds: int) -> None:
    trees = {"before": before, "now": _HERE} if before else {"now": _HERE}
    seen: dict[str, list[Figures]] = {name: [] for name in (*trees, "floor", "plain")}
    for number in range(rounds):
        seen["floor"].append(_figures("floor", _FLOOR, _HERE))
        seen["plain"].append(_plain())
        for name in sorted(trees, reverse=number % 2 == 0):
            seen[name].append(_figures("leanq", _PLAN, trees[name] or _HERE))
    for name in trees:
        for figure in ("p50_ms", "p99_ms"):
            _print(f"{name}: {figure[:3]} of one echo", seen[name], figure, seen["floor"], " ms")
        for part in ("server", "worker", "client", "cpu"):
            first = seen["before"] if before and name == "now" else None
            label = f"{name}: CPU of {part.replace('cpu', 'all')}, 1,000 outstanding"
            _print(label, seen[name], f"{part}_us_per_request", first, " µs")
        _print(f"{name}: echoes a second", seen[name], "rps", None, "")
        _print(f"{name}: 64 KiB a second", seen[name], "rps_64k", seen["plain"], "")
        _print(f"{name}: CPU of all, 64 KiB", seen[name], "cpu_us_64k", seen["plain"], " µs")


def _figures(module: str, plan: Plan, tree: Path) -> Figures:
    outcome = measure(module, plan, tree=tree)
    if outcome.failed:
        raise SystemExit(f"{module} of {tree}: {outcome.failed}")
    return outcome.figures


def _print(
    label: str, seen: Sequence[Figures], figure: str, unit: Sequence[Figures] | None, of: str
) -> None:
    value = statistics.median(figures[figure] for figures in seen)
    ratio = ""
    if unit:
        pairs = zip(seen, unit, strict=True)
        ratio = f"{statistics.median(a[figure] / b[figure] for a, b in pairs):.2f}"
    print(f"| {label} | {value:,.3g}{of} | {ratio} |", flush=True)


def _plain() -> Figures:
    """Sends the bytes of requests and replies of 64 KiB there and back, each set and got once."""
    payload = os.urandom(LARGE_BYTES)
    with server() as url, redis.Redis.from_url(url) as connection:
        own_s, server_s, begin_s, done = time.process_time(), cpu_s([url]), time.time(), 0
        while time.time() < begin_s + _PLAIN_S:
            for of in ("request", "reply"):
                names = [f"{of}:{n}" for n in range(_PIPELINED)]
                pipeline = connection.pipeline(transaction=False)
                for name in names:
                    pipeline.set(name, payload)
                pipeline.execute()
                for name in names:
                    pipeline.get(name)
                assert all(len(data) == LARGE_BYTES for data in pipeline.execute())
            done += _PIPELINED
        took_s = time.time() - begin_s
        used_s = time.process_time() - own_s + cpu_s([url]) - server_s
    return {"rps_64k": done / took_s, "cpu_us_64k": used_s / done * 1e6}


if __name__ == "__main__":
    main()
