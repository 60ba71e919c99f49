"""Runs every scenario under every policy from many seeds, and writes the results.

``python -m sim`` writes results.json, the plots and the tables in README.md. With ``--quick`` it
runs few seeds and prints only the tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

from sim.fleet import Fleet
from sim.measure import Figures, figures
from sim.policies import policies
from sim.report import report
from sim.scenarios import HUGE, STEADY, TEN

_HERE = Path(__file__).parent
_SCENARIOS = {scenario.name: scenario for scenario in (STEADY, *TEN, HUGE)}
_POLICIES = tuple(policies(STEADY, 0))
_HUGE_POLICIES = ("deadline", "reference")
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"
_COURSE_S = 60.0


class _Run(NamedTuple):
    scenario: str
    policy: str
    seed: int
    course: bool


def _run(run: _Run) -> tuple[Figures, dict[str, Any] | None]:
    scenario = _SCENARIOS[run.scenario]
    policy = policies(scenario, run.seed)[run.policy]()
    # Only a scaler that knows the idle workers can end them first.
    outcome = Fleet(
        scenario, policy, run.seed, idle_first=run.policy in ("deadline", "oracle")
    ).run()
    rounded = {
        name: None if value is None else round(value, 3)
        for name, value in figures(scenario, outcome).items()
    }
    if not run.course:
        return rounded, None
    step = int(_COURSE_S // 15)
    orders = [(round(at), count) for at, count in outcome.orders]
    queue = [(round(at), count) for at, count in outcome.queue[::step]]
    return rounded, {"orders": orders, "queue": queue}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 seeds, tables to standard output")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    seeds = 5 if chosen.quick else chosen.seeds
    began = time.monotonic()
    todo = [
        _Run(name, policy, seed, seed == chosen.first)
        for name in _SCENARIOS
        if name != HUGE.name
        for policy in _POLICIES
        for seed in range(chosen.first, chosen.first + seeds)
    ]
    huge = [
        _Run(HUGE.name, policy, seed, False)
        for policy in _HUGE_POLICIES
        for seed in range(chosen.first, chosen.first + (0 if chosen.quick else 3))
    ]
    runs: dict[str, dict[str, list[Figures]]] = {}
    courses: dict[str, dict[str, Any]] = {}
    with multiprocessing.Pool(chosen.processes) as pool:
        done = pool.imap(_run, [*todo, *huge])
        for run, (found, course) in zip([*todo, *huge], done, strict=True):
            runs.setdefault(run.scenario, {}).setdefault(run.policy, []).append(found)
            if course:
                courses.setdefault(run.scenario, {})[run.policy] = course
    texts = {name: scenario.text for name, scenario in _SCENARIOS.items()}
    results = {
        "seeds": seeds,
        "first": chosen.first,
        "processes": chosen.processes,
        "python": platform.python_version(),
        "minutes": (time.monotonic() - began) / 60,
        "texts": texts,
        "runs": runs,
        "courses": courses,
    }
    if chosen.quick:
        print(report(results))
        return
    (_HERE / "results.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
    readme = _HERE / "README.md"
    before, rest = readme.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    readme.write_text(f"{before}{_BEGIN}\n{report(results)}{_END}{after}")
    # Imported here, so that the simulation itself needs nothing but Python.
    from sim.plot import draw

    draw(_HERE)


if __name__ == "__main__":
    main()
