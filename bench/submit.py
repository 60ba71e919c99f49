"""Measures leanq's cost: the same Lean files through ``leanq submit`` and through plain ``xargs``.

All variants run in turn, round by round, on the same files with the same number of Lean processes.
A figure is the median of the rounds' ratios, so other work on the machine weighs on both sides
alike. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from places import LEANQ, Place, new_place, print_table, server_info, statement, worker, xargs
from processes import Run, cpu_s, run

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.commands.worker import cpus
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings

_ECHOES, _ECHOES_EACH, _OUTSTANDING, _ECHO_SLOTS = 500, 5, 1000, 256

# By name: the figure's title, its format, and its target.
_FIGURES = {
    "xargs_ms": ("xargs, per file", "{:.1f} ms", ""),
    "xargs_share": ("xargs, share that it got of all CPUs", "{:.0%}", ""),
    "cold": ("`submit --no-audit` / xargs", "{:.2f}", "≤ 1.10"),
    "cold_cpu": ("the same in CPU time", "{:.2f}", ""),
    "warm": ("the same in wall time, with a fleet that runs", "{:.2f}", ""),
    "audit": ("audit / check, theorems, by wall time of the call", "{:.1%}", "≤ 40 %"),
    "audit_s": ("audit / check, theorems, by `audit_s`", "{:.1%}", "≤ 40 %"),
    "example_s": ("audit / check, an `example` in each file, by `audit_s`", "{:.1%}", ""),
    "idle_worker": ("idle worker with its supervisors, of one CPU", "{:.2f} %", "< 1 %"),
    "idle_server": ("idle server, of one CPU", "{:.2f} %", ""),
    "echo_p50": ("echo, round trip, p50", "{:.2f} ms", ""),
    "echo_p99": ("echo, round trip, p99", "{:.2f} ms", ""),
    "echo_rate": (f"echo, {_OUTSTANDING} outstanding", "{:.0f} / s", ""),
}
_Figures = defaultdict[str, list[float]]


@dataclass(frozen=True)
class Work:
    """The files of all calls, named without their ``.lean``."""

    theorems: list[str]
    examples: list[str]


def main() -> None:
    """Prints the table. Leaves nothing behind, even after Ctrl-C and SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=200, help="Lean files in a call")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is run")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds of watching the idle")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures: _Figures = defaultdict(list)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder,
            EmbeddedServer() as server,
        ):
            place = new_place(Path(folder))
            work = write_work(place, options.files)
            info = server_info(server.url)
            fleet = {**place.variables, "LEANQ_URL": server.url}
            with worker(place, fleet) as pid:
                for number in range(options.rounds):
                    measure_round(figures, place, work, fleet, backwards=number % 2 == 1)
                measure_idle(figures, pid, int(info["process_id"]), options.idle_s)
            with worker(place, fleet, "--driver", "echo", "--slots", str(_ECHO_SLOTS)):
                for _ in range(options.rounds):
                    asyncio.run(measure_echo(figures, server.url))
    except KeyboardInterrupt:
        sys.exit(130)
    lean, valkey = place.environment.toolchain.version, info.get("valkey_version", "?")
    print(f"{options.files} files, {options.rounds} rounds, {cpus()} CPUs,", end=" ")
    print(f"Python {platform.python_version()}, Valkey {valkey}, Lean {lean}\n")
    print_table(_FIGURES, figures)


def write_work(place: Place, count: int) -> Work:
    files = {f"theorem_{n}": f"theorem bench_{n} {statement(n)}" for n in range(count)}
    # Each of these is compiled twice.
    examples = {f"example_{n}": f"example {statement(n)}" for n in range(-(-count // 10))}
    for name, command in (files | examples).items():
        place.write(name, command)
    return Work(list(files), list(examples))


def measure_round(
    figures: _Figures, place: Place, work: Work, fleet: Mapping[str, str], *, backwards: bool
) -> None:
    """Runs each of the commands once."""
    alone = place.variables
    calls = {
        "xargs": lambda: xargs(place, work.theorems, cpus()),
        "cold": lambda: submit(place, work.theorems, alone, "--no-audit"),
        "audited": lambda: submit(place, work.theorems, alone),
        "warm": lambda: submit(place, work.theorems, fleet, "--no-audit"),
    }
    runs = {name: calls[name]() for name in (reversed(calls) if backwards else calls)}
    base = runs["xargs"]
    figures["xargs_ms"].append(1000 * base.wall_s / len(work.theorems))
    figures["xargs_share"].append(base.cpu_s / base.wall_s / cpus())
    figures["cold"].append(runs["cold"].wall_s / base.wall_s)
    figures["cold_cpu"].append(runs["cold"].cpu_s / base.cpu_s)
    figures["warm"].append(runs["warm"].wall_s / base.wall_s)
    figures["audit"].append(runs["audited"].wall_s / runs["cold"].wall_s - 1)
    for figure, names in (("audit_s", work.theorems), ("example_s", work.examples)):
        figures[figure].append(audit_share(place, names, fleet["LEANQ_URL"]))


def audit_share(place: Place, names: Sequence[str], url: str) -> float:
    """Returns the audit's share on top of the checks of these files, as the replies tell it."""
    codes = [(place.files / f"{name}.lean").read_text() for name in names]
    with LeanQClient(Settings(url)) as lean:
        replies = [result.reply for result in lean.map(codes) if result.reply]
    audit_s = sum(reply.audit_s for reply in replies)
    return audit_s / (sum(reply.wall_s for reply in replies) - audit_s)


def submit(place: Place, names: Sequence[str], variables: Mapping[str, str], *options: str) -> Run:
    """Runs ``leanq submit``; fails unless all is accepted, or unjudged with ``--no-audit``."""
    files = [f"{name}.lean" for name in names]
    command = [*LEANQ, "submit", "--json", *options, *files]
    return run(command, variables, place.files, expected_code=3 if "--no-audit" in options else 0)


def measure_idle(figures: _Figures, worker_pid: int, server_pid: int, seconds: float) -> None:
    roots = {"idle_worker": worker_pid, "idle_server": server_pid}
    before = {name: cpu_s(pid) for name, pid in roots.items()}
    time.sleep(seconds)
    for name, pid in roots.items():
        figures[name].append(100 * (cpu_s(pid) - before[name]) / seconds)


async def measure_echo(figures: _Figures, url: str) -> None:
    """Measures round trips one by one, then requests per second with many outstanding."""
    async with AsyncLeanQClient(Settings(url=url)) as client:

        async def round_trips_ms(times: int) -> list[float]:
            moments = [time.perf_counter()]
            for _ in range(times):
                await client.echo(b"payload")
                moments.append(time.perf_counter())
            return [1000 * (after - before) for before, after in pairwise(moments)]

        trips_ms = await round_trips_ms(_ECHOES)
        started = time.perf_counter()
        await asyncio.gather(*(round_trips_ms(_ECHOES_EACH) for _ in range(_OUTSTANDING)))
        took_s = time.perf_counter() - started
    figures["echo_p50"].append(statistics.median(trips_ms))
    figures["echo_p99"].append(statistics.quantiles(trips_ms, n=100)[98])
    figures["echo_rate"].append(_OUTSTANDING * _ECHOES_EACH / took_s)


if __name__ == "__main__":
    main()
