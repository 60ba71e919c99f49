"""Compares the judge with the check before it: CPU time and memory of both, in one run.

Lean compiles each text in a process of its own, as a check does. The compiled file is judged, and
compared with itself as its own target. The judge's CPU time is that of its forked child; the work
before the fork is shared by all files with one header. Printing the theorems' statements is
measured apart. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leanq.lean.environment import Environment, open_environment
from leanq.lean.judge.judge_client import Judges
from leanq.lean.run.olean import read_parts
from leanq.lean.sandbox.cgroup import descendants
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header

_HEADER = "prelude\nimport Core\n"
_LIMITS = Limits(cpu_s=3600.0, wall_s=7200.0, memory_bytes=16 << 30)
_SMALL = "theorem t{n} (p q : Prop) (h : And p q) : And q p := And.intro h.right h.left\n"
_OPTIONS = (
    "set_option maxRecDepth 100000\nset_option maxHeartbeats 0\nset_option linter.all false\n"
)
_TWO = """inductive Two (a b : Type) : Type where | mk : a -> b -> Two a b
axiom dup {a : Type} (x : a) : Two a a
"""
_TREE = """axiom Tree : Type
axiom node : Tree -> Tree -> Tree
axiom Good : Tree -> Prop
axiom good (t : Tree) : Good t
"""
_LEVELS = 100
_LARGE_NODES = 500_000
_ORDER: dict[str, Any] = {
    "ending": ("", ""),
    "target_ending": ("", ""),
    "theorems": (),
    "holes": (),
    "allowed": (),
    "is_whole": False,
    "unfilled": "",
    "op": "verify",
}


def texts(large: bool) -> Iterator[tuple[str, str]]:
    """Yields the texts to measure, each with its name."""
    yield "one small theorem", _SMALL.format(n=0)
    yield "20 theorems", "".join(_SMALL.format(n=n) for n in range(20))
    for leaves, towers in ((58, 25), (183, 240), *(((579, 2400),) if large else ())):
        yield f"unshared: a tree with {leaves}^2 pairs", _unshared(leaves)
        yield f"shared: {towers} towers of pairs", _shared(towers)


def _unshared(leaves: int) -> str:
    """Returns a statement about a tree of all pairs of so many leaves, with no shared parts."""
    pairs = [f"(node l{m} l{n})" for m in range(leaves) for n in range(leaves)]
    while len(pairs) > 1:
        last = [pairs[-1]] if len(pairs) % 2 else []
        halves = zip(pairs[::2], pairs[1::2], strict=False)
        pairs = [f"(node {left} {right})" for left, right in halves] + last
    names = "".join(f"axiom l{n} : Tree\n" for n in range(leaves))
    return f"{_OPTIONS}{_TREE}{names}theorem tree : Good {pairs[0]} := good _\n"


def _shared(count: int) -> str:
    """Returns theorems about pairs of pairs: about 400 nodes each, 2^100 without sharing."""
    towers = []
    for n in range(count):
        term = "(dup " * _LEVELS + _number(n) + ")" * _LEVELS
        towers.append(f"theorem s{n} : Eq {term} {term} := Eq.refl _\n")
    return _OPTIONS + _TWO + "".join(towers)


def _number(n: int) -> str:
    """Returns a term that shares only its end with those of other numbers."""
    text = "Nat.zero"
    for bit in f"{n:b}":
        text = f"(Nat.succ {text})" if bit == "1" else f"(id {text})"
    return text


async def measure(environment: Environment, name: str, text: str, times: int) -> None:
    """Prints one row."""
    judges = Judges(environment, slots=1, prints=False)
    printing = Judges(environment, slots=1)
    header = split_header(_HEADER)
    judged, compared, printed, peaks = [], [], [], []
    try:
        if why := await judges.unavailable():
            raise SystemExit(why)
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            checks = [_compile(environment, where, text)]
            file = read_parts(where / "x.olean")
            nodes = (await judges.judge(header, file, ("", ""), _LIMITS)).nodes
            times = 1 if nodes > _LARGE_NODES else times
            checks += [_compile(environment, where, text) for _ in range(times - 1)]
        for _ in range(times):
            found = await judges.judge(header, file, ("", ""), _LIMITS)
            both = await judges.ask(header, [file, file], _ORDER, _LIMITS)
            if not found.proved or not both.proved or both.differences:
                raise SystemExit(f"{name}: {found} {both}")
            judged.append(found.cpu_s)
            compared.append(both.cpu_s - found.cpu_s)
            also = await printing.judge(header, file, ("", ""), _LIMITS)
            printed.append(also.cpu_s - found.cpu_s)
            peaks.append(found.peak_bytes)
        parent_mb = max(_peaks_kb()) >> 10  # of either judge
    finally:
        await judges.close()
        await printing.close()
    check_ms, judge_ms, compare_ms, print_ms = (
        1000 * statistics.median(each)
        for each in ([cpu_s for cpu_s, _ in checks], judged, compared, printed)
    )
    megabytes = [max(peak for _, peak in checks) >> 20, max(peaks) >> 20, parent_mb]
    print(
        f"| {name} | {nodes:,} | {check_ms:,.0f} | {judge_ms:,.1f} | {compare_ms:,.1f} "
        f"| {print_ms:,.1f} "
        f"| {judge_ms / check_ms:.3f} | {' | '.join(f'{each:,}' for each in megabytes)} |",
        flush=True,
    )


def _compile(environment: Environment, folder: Path, text: str) -> tuple[float, int]:
    """Returns the CPU seconds and peak bytes of a plain check; leaves its compiled file there."""
    source = folder / "x.lean"
    source.write_text(f"{_HEADER}{text}")
    process = subprocess.Popen(
        [*environment.toolchain.command, "-o", "x.olean", "x.lean"],
        env=environment.process_env(),
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit("Lean does not compile the text")
    return used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def _peaks_kb() -> Iterator[int]:
    """Yields the most resident memory of each judge's process."""
    for pid in descendants():
        if b"judge_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            status = Path(f"/proc/{pid}/status").read_text()
            yield int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=9, help="runs of each text but the largest")
    parser.add_argument("--large", action="store_true", help="texts of a million nodes as well")
    given = parser.parse_args()
    environment = open_environment("default", None)
    started = time.monotonic()
    print(
        "| text | nodes | check, CPU ms | judge, CPU ms | comparison, CPU ms "
        "| statements, CPU ms | judge / check "
        "| peak of Lean, MB | of the judge's child | of its parent |"
    )
    print(f"|{' --- |' * 10}")
    for name, text in texts(given.large):
        asyncio.run(measure(environment, name, text, given.times))
    load = os.getloadavg()[1]
    print(f"{time.monotonic() - started:.0f} s in all; load {load:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
