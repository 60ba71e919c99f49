"""Simulates histories until the time is over or one fails; that one is made smaller and printed.

The same seed gives the same history, on any machine, where the server is Valkey 9 or newer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import resource
import signal
import sys
import time
from collections import Counter
from typing import Any

import redis
from simulation.defects import DEFECTS
from simulation.history import Outcome, play
from simulation.network import RealServer
from simulation.plan import Plan, drawn
from simulation.shrink import shrunk
from support.servers import own_server


def server_options() -> tuple[str, ...]:
    """Returns what keeps the order of a server's hashes, which is part of the history.

    Redis, and Valkey before 9, have no such option.
    """
    with own_server() as server, redis.Redis.from_url(server.settings.url) as connection:
        return ("--hash-seed", "simulation") if connection.config_get("hash-seed") else ()


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        # So is that of Python's sets.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all histories")
    parser.add_argument(
        "--first", type=int, default=random.SystemRandom().randrange(10**9), help="seed"
    )
    # A simulation and its server take turns, and leave some of two processors' time.
    jobs = (os.cpu_count() or 1) + 1
    parser.add_argument("--jobs", type=int, default=jobs, help="at the same time")
    parser.add_argument("--seed", type=int, help="this history alone")
    parser.add_argument("--requests", help="of it, these alone: 3,17")
    parser.add_argument("--failures", help="of it, these alone, counted from 0; - is none")
    parser.add_argument(
        "--defects", nargs="*", metavar="NAME", help="how soon these defects are found, or all"
    )
    given = parser.parse_args()
    # So that its servers end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if given.seed is not None:
        return _replay(_part(given))
    if given.defects is not None:
        return _find_defects(given.defects)
    return _simulate(given)


def _part(given: Any) -> Plan:
    plan = drawn(given.seed)
    asks, failures = plan.asks, plan.failures
    if given.requests:
        numbers = set(map(int, given.requests.split(",")))
        asks = [ask for ask in asks if ask.number in numbers]
    if given.failures:
        chosen = [] if given.failures == "-" else given.failures.split(",")
        failures = [failures[int(n)] for n in chosen]
    return plan.part(asks, failures)


def _replay(plan: Plan) -> int:
    with own_server(*server_options()) as server:
        outcome = play(plan, RealServer(server.folder / "server.sock"))
    for event in outcome.events:
        print(*event)
    print(_told(plan, outcome))
    return 1 if outcome.faults else 0


def _told(plan: Plan, outcome: Outcome) -> str:
    lines = [f"{len(plan.asks)} requests; leases of {plan.lease_s:g} s; {plan.slots} slots"]
    lines += [f"  {failure}" for failure in plan.failures]
    lines += [f"FAULT {fault}" for fault in outcome.faults] or ["no fault"]
    return "\n".join(lines)


def _simulate(given: Any) -> int:
    context = multiprocessing.get_context("fork")
    told: Any = context.Queue()
    end_s = time.time() + given.seconds
    jobs = [
        context.Process(target=_work, args=(given.first + n, given.jobs, end_s, told))
        for n in range(given.jobs)
    ]
    started_s = time.time()
    for job in jobs:
        job.start()
    count, requests, simulated_s = 0, 0, 0.0
    happened: Counter[str] = Counter()
    failed: list[str] = []
    try:
        while any(job.is_alive() for job in jobs) or not told.empty():
            try:
                seconds, asked, befell, failure = told.get(timeout=1.0)
            except queue.Empty:
                continue
            count += 1
            requests += asked
            simulated_s += seconds
            happened.update(befell)
            failed += [failure] if failure else []
    finally:
        took_s = time.time() - started_s
        for job in jobs:
            job.terminate()
            job.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (used.ru_utime + used.ru_stime) / max(1, count)
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(happened.items()))
    print(
        f"{count:,} histories from seed {given.first:,} in {took_s:.0f} s "
        f"({60 * count / took_s:.0f} a minute; {cpu_s:.2f} s of CPU time each): "
        f"{requests:,} requests, {simulated_s / 3600:.1f} simulated hours; {kinds}"
    )
    print("\n\n".join(failed) or "no fault")
    broken = any(job.exitcode for job in jobs)
    return 1 if failed or broken or not count else 0


def _work(seed: int, step: int, end_s: float, told: Any) -> None:
    with own_server(*server_options()) as server:
        real = RealServer(server.folder / "server.sock")
        while time.time() < end_s:
            plan = drawn(seed)
            outcome = play(plan, real)
            failure = ""
            if outcome.faults:
                small = shrunk(plan, lambda part: bool(play(part, real).faults))
                failure = (
                    f"{_told(small, play(small, real))}\n{plan.command()} fails; made smaller:\n"
                )
                failure += f"  PYTHONPATH=.:tests {small.command()}"
            told.put((outcome.seconds, len(plan.asks), outcome.happened, failure))
            if failure:
                break
            seed += step


def _find_defects(names: list[str]) -> int:
    """After how many histories the defects of these names, or all, are found, from seed 1 on."""
    missed = 0
    chosen = [defect for defect in DEFECTS if not names or defect.name in names]
    with own_server(*server_options()) as server:
        real = RealServer(server.folder / "server.sock")
        for defect in chosen:
            with defect.made():
                seeds = range(1, 201)
                found = next((seed for seed in seeds if play(drawn(seed), real).faults), None)
            missed += found is None
            print(f"{found or 'MISSED':>6}  {defect.name}", flush=True)
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
