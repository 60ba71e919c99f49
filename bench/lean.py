"""Measures leanq's cost beside Lean: files of some 100 ms through a running fleet, and ``xargs``.

Both run in turn, round by round, on the same files with the same number of Lean processes. See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from places import (
    LEANQ,
    Place,
    lean,
    new_place,
    print_table,
    server_info,
    statement,
    worker,
    xargs,
)
from processes import Run, cpu_by_role_s, cpu_s, process

from leanq.client import AsyncLeanQClient
from leanq.local import EmbeddedServer
from leanq.producer.request_builder import Check
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings

_SLOTS = 2
# The header is preloaded and proved meanwhile.
_WARM_UP_S = 15.0
_PRELOADED_S = 300.0
_THINK_S = 0.25  # pause between two checks of a client that sends one at a time

# By name: the figure's title, its format, and its target.
_FIGURES = {
    "xargs_ms": (f"`xargs -P {_SLOTS}`, per file", "{:.1f} ms", ""),
    "xargs_cpu_ms": ("CPU time of it, per file", "{:.1f} ms", ""),
    "share": (f"CPU time of it, of {_SLOTS} CPUs", "{:.0%}", ""),
    "throughput": (f"throughput of {_SLOTS} slots / of `xargs`", "{:.3f}", ""),
    "cpu": ("CPU time of all that runs / of `xargs`", "{:.3f}", ""),
    "worker_ms": ("CPU time of worker, supervisors and Lean, per file", "{:.1f} ms", ""),
    **{
        f"of_{role}_ms": (f"of it {title}, per file", "{:.1f} ms", "")
        for role, title in {
            "worker": "the worker itself",
            "supervisor": "the supervisors",
            "zygote": "what Lean is forked from",
            "Lean": "Lean",
            "judge_process": "the judge",
            "judge's forks": "the judge's forks",
        }.items()
    },
    "server_ms": ("CPU time of the server, per file", "{:.2f} ms", ""),
    "client_ms": ("CPU time of the client, per file", "{:.2f} ms", ""),
    "plain": ("one file at a time, plain Lean, median", "{:.1f} ms", ""),
    "alone": ("one check at a time, with pauses, median", "{:.1f} ms", ""),
    "alone_to_plain": ("one check at a time, without pauses / plain Lean", "{:.2f}", ""),
    "back": ("one check at a time, without pauses, median", "{:.1f} ms", ""),
}
_Figures = defaultdict[str, list[float]]
_Kinds = Mapping[str, tuple[str, str, str]]
_HEADERS = {
    "std": "import Std",
    "none": "",
    "remark": "/- a remark\nof two lines -/\nimport Std -- another",
    "part": "import Std.Data.HashMap",
}
_MIXED = ("std", "none", "part")  # headers of texts in random order
# Each set of these is a header that comes once in a round.
_PARTS = ("Data.HashMap", "Data.TreeMap", "Data.HashSet", "Time", "Sync", "Do", "Net")
_BURST = 4
_EACH_KIND = ("xargs_ms", "xargs_cpu_ms", "throughput", "cpu", "worker_ms")
_LIBRARY_FIGURES = {
    **{
        f"{kind}_{name}": (f"{title}: {_FIGURES[name][0]}", _FIGURES[name][1], target)
        for kind, title in (
            ("std", "`import Std`"),
            ("none", "no header"),
            ("remark", "a comment above"),
            ("mixed", "three headers at random"),
            ("once", "a header for each text"),
        )
        for name in _EACH_KIND
        for target in ["≥ 3.4" if name == "throughput" and kind != "once" else ""]
    },
    "std_preloaded_s": ("`import Std`: until forks serve it, unproved before", "{:.1f} s", "≤ 6 s"),
    "none_preloaded_s": ("no header: until forks serve it, unproved before", "{:.1f} s", "≤ 6 s"),
    "load": ("load", "{:.1f}", ""),
}


@dataclass(frozen=True)
class Fleet:
    """A server and a worker, both running."""

    url: str
    server_pid: int
    worker_pid: int
    judges: bool
    prints: bool = True

    def cpu_s(self) -> tuple[Counter[str], float]:
        """Returns the CPU seconds of the worker with all below it, by role, and of the server."""
        return cpu_by_role_s(self.worker_pid), cpu_s(self.server_pid)


def main() -> None:
    """Prints the table. Leaves nothing behind, even after Ctrl-C and SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=60, help="Lean files in a round")
    parser.add_argument("--statements", type=int, default=20, help="theorems in a file")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is run")
    parser.add_argument("--alone", type=int, default=10, help="checks one at a time, in a round")
    parser.add_argument("--judge", action="store_true", help="have all of them judged")
    parser.add_argument(
        "--no-statements", action="store_true", help="ask for no printed statements, as rewards do"
    )
    parser.add_argument("--no-fork-server", action="store_true", help="Lean starts for each file")
    parser.add_argument(
        "--library",
        type=Path,
        metavar="FOLDER",
        help="a toolchain with a full library: one theorem by omega and one by simp a file, behind "
        "import Std, without a header, and with a comment above the imports",
    )
    parser.add_argument("--json", action="store_true", help="print the medians as a JSON line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures: _Figures = defaultdict(list)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder,
            EmbeddedServer() as server,
        ):
            place = new_place(Path(folder), options.library)
            if options.library:
                with worker_with_log(place, server.url) as (pid, log):
                    measure_library(options, place, server.url, pid, log, figures)
                print_figures(options, place, _LIBRARY_FIGURES, figures)
                return
            names = [f"file_{number}" for number in range(options.files)]
            for number, name in enumerate(names):
                first = number * options.statements
                numbers = range(first, first + options.statements)
                place.write(name, *(f"theorem bench_{n} {statement(n)}" for n in numbers))
            variables = {**place.variables, "LEANQ_URL": server.url}
            arguments = ["--slots", str(_SLOTS)]
            if options.no_fork_server:
                arguments.append("--no-fork-server")
            with worker(place, variables, *arguments) as pid:
                server_pid = int(server_info(server.url)["process_id"])
                fleet = Fleet(server.url, server_pid, pid, options.judge, not options.no_statements)
                warm_until_s = time.monotonic() + _WARM_UP_S
                while time.monotonic() < warm_until_s:
                    asyncio.run(through_leanq(place, fleet, names))
                for number in range(options.rounds):
                    measure_round(figures, place, fleet, names, backwards=number % 2 == 1)
                    if options.alone:
                        measure_alone(figures, place, fleet, names[: options.alone])
    except KeyboardInterrupt:
        sys.exit(130)
    print_figures(options, place, _FIGURES, figures)


def print_figures(
    options: argparse.Namespace, place: Place, kinds: _Kinds, figures: _Figures
) -> None:
    if options.json:
        medians = {name: round(statistics.median(each), 3) for name, each in figures.items()}
        print(json.dumps(medians))
        return
    print(f"{options.files} files of {options.statements} theorems, {options.rounds} rounds,")
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()},", end=" ")
    print(f"Lean {place.environment.toolchain.version}\n")
    print_table(kinds, figures)


@contextlib.contextmanager
def worker_with_log(place: Place, url: str) -> Iterator[tuple[int, Path]]:
    """Starts a worker; yields it once it is ready, with its log file."""
    log = Path(place.variables["TMPDIR"], "worker.log")
    command = [*LEANQ, "worker", "--slots", str(_SLOTS)]
    with log.open("wb") as stderr:
        variables = {**place.variables, "LEANQ_URL": url}
        with process(command, variables, place.files, stderr=stderr) as child:
            wait_for(log, " serves ")
            yield child.pid, log


def wait_for(log: Path, words: str) -> None:
    until_s = time.monotonic() + _PRELOADED_S
    while words not in log.read_text():
        if time.monotonic() > until_s:
            sys.exit(f"the worker's log does not say {words!r}: {log.read_text()[-1000:]}")
        time.sleep(0.05)


def measure_library(
    options: argparse.Namespace,
    place: Place,
    url: str,
    pid: int,
    log: Path,
    figures: _Figures,
) -> None:
    """Measures how soon forks serve a header, then each kind of header beside plain Lean."""
    fleet = Fleet(url, int(server_info(url)["process_id"]), pid, True, not options.no_statements)
    kinds = {}
    for kind, header in _HEADERS.items():
        kinds[kind] = [f"{kind}_{number}" for number in range(options.files)]
        for number, name in enumerate(kinds[kind]):
            place.write(name, *_by_tactics(number), header=header)
    at_random = random.Random(1).choices(_MIXED, k=options.files)
    mixed = [kinds[kind][number] for number, kind in enumerate(at_random)]
    for kind, preloaded in (
        ("std", "preloaded 'import Std'"),
        ("none", "preloaded ''"),
        ("part", "preloaded 'import Std.Data.HashMap'"),
    ):
        began_s = time.monotonic()
        while preloaded not in log.read_text():
            if time.monotonic() > began_s + _PRELOADED_S:
                sys.exit(f"the header is not preloaded: {log.read_text()[-1000:]}")
            asyncio.run(through_leanq(place, fleet, kinds[kind][:_BURST]))
        figures[f"{kind}_preloaded_s"].append(time.monotonic() - began_s)
    del kinds["part"]
    kinds["mixed"] = mixed
    rounds = [(number, kind) for number in range(options.rounds) for kind in kinds]
    # Last, since so many headers push out the others.
    rounds += [(number, "once") for number in range(options.rounds)]
    kinds["once"] = [f"once_{number}" for number in range(options.files)]
    for number, name in enumerate(kinds["once"], start=1):
        chosen = (each for bit, each in enumerate(_PARTS) if number >> bit & 1)
        place.write(name, *_by_tactics(number), header="\n".join(f"import Std.{c}" for c in chosen))
    for number, kind in rounds:
        one: _Figures = defaultdict(list)
        measure_round(one, place, fleet, kinds[kind], backwards=number % 2 == 1)
        for name in _EACH_KIND:
            figures[f"{kind}_{name}"] += one[name]
        figures["load"].append(os.getloadavg()[0])


def _by_tactics(number: int) -> tuple[str, str]:
    """Returns two theorems that no other number has."""
    return (
        f"theorem o{number} (a b : Nat) (h : a + {number} < b) : a + {number + 1} ≤ b := by omega",
        f"theorem s{number} (xs : List Nat) : (xs ++ []).length + {number} = "
        f"xs.length + {number} := by simp",
    )


def measure_round(
    figures: _Figures, place: Place, fleet: Fleet, names: list[str], *, backwards: bool
) -> None:
    """Runs all files both ways."""
    before = after = Counter[str](), 0.0
    runs: dict[str, Run] = {}
    for name in ("leanq", "xargs") if backwards else ("xargs", "leanq"):
        if name == "xargs":
            runs[name] = xargs(place, names, _SLOTS)
        else:
            before = fleet.cpu_s()
            runs[name] = asyncio.run(through_leanq(place, fleet, names))
            after = fleet.cpu_s()
    base, ours = runs["xargs"], runs["leanq"]
    by_role_s, server_s = after[0] - before[0], after[1] - before[1]
    worker_s = by_role_s.total()
    total_s = worker_s + server_s + ours.cpu_s
    figures["xargs_ms"].append(1000 * base.wall_s / len(names))
    figures["xargs_cpu_ms"].append(1000 * base.cpu_s / len(names))
    figures["share"].append(base.cpu_s / base.wall_s / _SLOTS)
    figures["throughput"].append(base.wall_s / ours.wall_s)
    figures["cpu"].append(total_s / base.cpu_s)
    figures["worker_ms"].append(1000 * worker_s / len(names))
    for role, each_s in by_role_s.items():
        figures[f"of_{role}_ms"].append(1000 * each_s / len(names))
    figures["server_ms"].append(1000 * server_s / len(names))
    figures["client_ms"].append(1000 * ours.cpu_s / len(names))


async def through_leanq(place: Place, fleet: Fleet, names: Sequence[str]) -> Run:
    """Runs all files at once, from first submit to last reply. Its CPU time is the client's."""
    codes = [(place.files / f"{name}.lean").read_text() for name in names]
    how: Check = {"audit": fleet.judges, "statements": fleet.prints}
    async with AsyncLeanQClient(Settings(url=fleet.url)) as client:
        started, cpu_before_s = time.perf_counter(), time.process_time()
        replies = await asyncio.gather(*(client.check(code, **how) for code in codes))
        run = Run(time.perf_counter() - started, time.process_time() - cpu_before_s, b"")
    for reply in replies:
        expect_accepted(reply)
    return run


def expect_accepted(reply: Reply) -> None:
    if reply.verdict not in ("accepted", "unjudged"):  # "unjudged" is accepted without a judge
        sys.exit(f"a check ended as {reply.verdict}: {reply.messages}")


def measure_alone(figures: _Figures, place: Place, fleet: Fleet, names: Sequence[str]) -> None:
    """Runs one file at a time: plain Lean, then a client with pauses, then one without."""
    command, variables = lean(place)
    olean = f"{place.variables['TMPDIR']}/alone.olean"
    plain = []
    for name in names:
        started = time.perf_counter()
        each = [*command, olean, f"{name}.lean"]
        subprocess.run(each, env=variables, cwd=place.files, check=True)
        plain.append(1000 * (time.perf_counter() - started))
    figures["plain"].append(statistics.median(plain))
    for figure, pause_s in (("alone", _THINK_S), ("back", 0.0)):
        times_ms = asyncio.run(one_by_one_ms(place, fleet, names, pause_s))
        figures[figure].append(statistics.median(times_ms))
    figures["alone_to_plain"].append(figures["back"][-1] / figures["plain"][-1])


async def one_by_one_ms(
    place: Place, fleet: Fleet, names: Sequence[str], pause_s: float
) -> list[float]:
    times_ms = []
    async with AsyncLeanQClient(Settings(url=fleet.url)) as client:
        for name in names:
            await asyncio.sleep(pause_s)
            code = (place.files / f"{name}.lean").read_text()
            started = time.perf_counter()
            reply = await client.check(code, audit=fleet.judges, statements=fleet.prints)
            expect_accepted(reply)
            times_ms.append(1000 * (time.perf_counter() - started))
    return times_ms


if __name__ == "__main__":
    main()
