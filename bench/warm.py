"""Measures what headers cost that no process has imported: of a fresh worker, a search, many.

Each part compares with plain Lean within the same minutes. Ways take turns, round by round; a round
has headers that no other round has, so nothing of them is remembered. See README.md beside this
file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from lean import Fleet, through_leanq, worker_with_log
from places import Place, lean, new_place, print_table, server_info, xargs

from leanq.lean import driver as lean_driver
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import open_environment
from leanq.lean.run.process import Lean
from leanq.lean.sandbox.sandbox import Finished
from leanq.local import EmbeddedServer
from leanq.queue.requests import Request
from leanq.states import MemoryStates

_SLOTS = 2
# Any three of them are a header.
_PARTS = (
    *("Std.Data.HashMap", "Std.Data.TreeMap", "Std.Data.HashSet", "Std.Time", "Std.Sync"),
    *("Std.Do", "Std.Net", "Std.Data.DHashMap", "Std.Data.TreeSet", "Lean.Data.Json"),
    *("Lean.Data.RBTree", "Lean.Data.Xml", "Lean.Data.PersistentHashMap", "Lean.Parser"),
)
_STEPS = 7
_WARM_AT_MOST_S = 300.0
_QUIET_S, _QUIET_CPU_S, _LOOK_S = 0.5, 0.02, 0.1
_FIGURES = {
    "kept": ("a fresh worker's {batch} over a warm one's, in plain Lean's starts", "{:.1f}", "≤ 3"),
    "empty": ("the same with nothing in leanq's cache folder", "{:.1f}", ""),
    "first": ("a fresh worker's first reply, in plain Lean's starts", "{:.1f}", ""),
    "warm_s": ("a warm worker's {batch}", "{:.2f} s", ""),
    "start_s": ("plain Lean's start", "{:.2f} s", ""),
    "search": (f"of the first {_STEPS} requests of a search: those that start Lean", "{:.0f}", "0"),
    "few": ("{headers} headers with six texts each: throughput / `xargs`", "{:.2f}", ""),
    "few_cpu": ("the same, CPU time / `xargs`", "{:.2f}", "≤ 1.2"),
    "once": ("a header for each of {batch}: throughput / `xargs`", "{:.2f}", "≥ 0.8"),
    "once_cpu": ("the same, CPU time / `xargs`", "{:.2f}", ""),
    **{
        f"{kind}_{role}_ms": (f"the same, CPU time of {title} a text", "{:.0f} ms", "")
        for kind in ("few", "once")
        for role, title in {
            "xargs": "`xargs`",
            "worker": "the worker",
            "supervisor": "supervisors",
            "zygote": "what Lean is forked from",
            "Lean": "Lean",
            "judge_process": "judges",
            "judge's forks": "judges' forks",
        }.items()
    },
    "load": ("load", "{:.1f}", ""),
}
_Figures = defaultdict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path, help="a toolchain with a full library")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=60, help="texts of a batch")
    parser.add_argument("--headers", type=int, default=20, help="headers with six texts each")
    parser.add_argument("--only", default="fresh,search,few,once", help="the parts to measure")
    parser.add_argument("--no-statements", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the medians as a JSON line")
    given = parser.parse_args()
    figures: _Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder, EmbeddedServer() as server:
        place = new_place(Path(folder), given.library)
        chosen = _headers()
        for number in range(given.rounds):
            if "fresh" in given.only:
                _fresh(given, place, server.url, number, figures)
            if "search" in given.only:
                figures["search"].append(asyncio.run(_search(place)))
            for part, each in (("few", 6), ("once", 1)):
                if part in given.only:
                    count = given.headers if part == "few" else given.texts
                    headers = [next(chosen) for _ in range(count)]
                    _many(given, place, server.url, (part, number), headers * each, figures)
            figures["load"].append(os.getloadavg()[0])
    if given.json:
        print(json.dumps({name: statistics.median(each) for name, each in figures.items()}))
        return
    words = {"batch": f"{given.texts} texts", "headers": given.headers}
    kinds = {name: (what.format(**words), *more) for name, (what, *more) in _FIGURES.items()}
    print_table(kinds, figures)


def _headers() -> Iterator[str]:
    """Yields headers, each of which imports three modules, in an order of no meaning."""
    found = ["\n".join(f"import {each}" for each in three) for three in combinations(_PARTS, 3)]
    random.Random(1).shuffle(found)
    yield from found


def _write(place: Place, prefix: str, headers: Sequence[str]) -> list[str]:
    """Writes a file of two theorems behind each header; returns their names."""
    names = [f"{prefix}_{number}" for number in range(len(headers))]
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        place.write(
            name,
            f"theorem o{number} (a b : Nat) (h : a + {number} < b) : a + {number + 1} ≤ b := "
            "by omega",
            f"theorem s{number} (xs : List Nat) : (xs ++ []).length + {number} = "
            f"xs.length + {number} := by simp",
            header=header,
        )
    return names


def _fresh(
    given: argparse.Namespace, place: Place, url: str, number: int, figures: _Figures
) -> None:
    """Measures a batch of a worker that has just started, with what earlier ones have left in the
    cache folder and without, beside the same worker's later batches."""
    names = _write(place, f"fresh_{number}", ["import Lean"] * given.texts)
    command, variables = lean(place)
    olean = f"{place.variables['TMPDIR']}/start.olean"
    starts = []
    for name in names[:5]:
        began_s = time.perf_counter()
        each = [*command, olean, f"{name}.lean"]
        subprocess.run(each, env=variables, cwd=place.files, check=True)
        starts.append(time.perf_counter() - began_s)
    start_s = statistics.median(starts)
    figures["start_s"].append(start_s)
    for kind in ("empty", "kept"):
        if kind == "empty":
            shutil.rmtree(place.variables["LEANQ_CACHE"])
        with worker_with_log(place, url) as (pid, _):
            fleet = _fleet(given, url, pid)
            fresh = asyncio.run(through_leanq(place, fleet, names)).wall_s
            _wait_until_quiet(fleet)
            warm = [asyncio.run(through_leanq(place, fleet, names)).wall_s for _ in range(3)]
        warm_s = statistics.median(warm)
        figures[kind].append((fresh - warm_s) / start_s)
        figures["warm_s"].append(warm_s)
    with worker_with_log(place, url) as (pid, _):
        first = asyncio.run(through_leanq(place, _fleet(given, url, pid), names[:1]))
        figures["first"].append(first.wall_s / start_s)


def _fleet(given: argparse.Namespace, url: str, pid: int) -> Fleet:
    return Fleet(url, int(server_info(url)["process_id"]), pid, True, not given.no_statements)


def _wait_until_quiet(fleet: Fleet) -> None:
    """Waits until the worker does nothing any more, as when it has proved its forks."""
    until_s = time.monotonic() + _WARM_AT_MOST_S
    seen_s, since_s = fleet.cpu_s()[0].total(), time.monotonic()
    while time.monotonic() - since_s < _QUIET_S:
        if time.monotonic() > until_s:
            sys.exit("the worker does not come to rest")
        time.sleep(_LOOK_S)
        if (now_s := fleet.cpu_s()[0].total()) - seen_s > _QUIET_CPU_S:
            seen_s, since_s = now_s, time.monotonic()


class _Counted(Lean):
    """Counts the texts for which a Lean starts."""

    started = 0

    async def _started(self, *arguments: Any) -> Finished:
        _Counted.started += 1
        return await super()._started(*arguments)


async def _search(place: Place) -> float:
    """Returns how many requests of a search start a Lean, behind a header that checks have used."""
    environment = open_environment("default", None, environ=place.variables)
    lean_driver.Lean = _Counted  # type: ignore[misc]
    driver = LeanDriver(lambda: environment, slots=_SLOTS)
    try:
        await driver.open(MemoryStates())
        header, until_s = "import Lean\n", time.monotonic() + _WARM_AT_MOST_S
        before = -1
        while before != _Counted.started and time.monotonic() < until_s:
            before = _Counted.started
            for _ in range(5):
                await driver.run(Request("check", f"{header}theorem t (h : p) : p := h"))
        text = f"{header}theorem t (p q : Prop) : p → q → p ∧ q := by\n  sorry"
        reply = await driver.run(Request("check", text))
        state = reply.sorries[0].state or ""
        for tactic in ("intro h", "intro h k", "intros", "constructor", "skip"):
            await driver.run(Request("step", state=state, tactic=tactic))
        closing = await driver.run(Request("step", state=state, tactic="exact fun h k => ⟨h, k⟩"))
        assert closing.verdict == "accepted", closing
        return _Counted.started - before
    finally:
        await driver.close()


def _many(
    given: argparse.Namespace,
    place: Place,
    url: str,
    part: tuple[str, int],
    headers: list[str],
    figures: _Figures,
) -> None:
    """Measures texts of many headers on a worker that has served others, beside ``xargs``."""
    kind, number = part
    names = _write(place, f"{kind}_{number}", headers)
    with worker_with_log(place, url) as (pid, _):
        fleet = _fleet(given, url, pid)
        before_names = _write(place, "before", ["import Std"] * 10)
        asyncio.run(through_leanq(place, fleet, before_names))
        _wait_until_quiet(fleet)
        plain = xargs(place, names, _SLOTS) if number % 2 else None
        before, server_before_s = fleet.cpu_s()
        ours = asyncio.run(through_leanq(place, fleet, names))
        _wait_until_quiet(fleet)
        after, server_after_s = fleet.cpu_s()
    plain = plain or xargs(place, names, _SLOTS)
    used = after - before
    total_s = used.total() + server_after_s - server_before_s + ours.cpu_s
    figures[kind].append(plain.wall_s / ours.wall_s)
    figures[f"{kind}_cpu"].append(total_s / plain.cpu_s)
    for role, each_s in (*used.items(), ("xargs", plain.cpu_s)):
        figures[f"{kind}_{role}_ms"].append(1000 * each_s / len(names))


if __name__ == "__main__":
    main()
