"""What the judge costs beside the check that it follows: CPU time of both, in one run.

Each text is compiled by Lean in a process of its own, as a check does it, and its compiled file is
judged and compared with itself as its own target. The judge's CPU time is that of its forked child
and, as the rest is shared by all files with one header, of nothing else. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from leanq.lean.audit.judges import Judges
from leanq.lean.audit.olean import read_parts
from leanq.lean.environment import Environment, open_environment
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.syntax import split_header

_HEADER = "prelude\nimport Core\n"
_LIMITS = Limits(cpu_s=3600.0, wall_s=7200.0, memory_bytes=16 << 30)
_SMALL = "theorem t{n} (p q : Prop) (h : And p q) : And q p := And.intro h.right h.left\n"


def texts(large: bool) -> Iterator[tuple[str, str]]:
    """The texts to be measured, by what they are."""
    yield "one small theorem", _SMALL.format(n=0)
    yield "20 theorems", "".join(_SMALL.format(n=n) for n in range(20))
    for depth in (6, 9, *((12,) if large else ())):
        yield f"2^{depth} conjunctions, unshared", _tower(depth)


def _tower(depth: int) -> str:
    """A proof of a conjunction of 2^depth different parts: nothing in it is shared."""

    def parts(first: int, level: int) -> tuple[str, str]:
        if level == 0:
            return f"(Eq {_number(first)} {_number(first)})", f"(Eq.refl {_number(first)})"
        half = 1 << level - 1
        (a, x), (b, y) = parts(first, level - 1), parts(first + half, level - 1)
        return f"(And {a} {b})", f"(And.intro {x} {y})"

    statement, proof = parts(0, depth)
    options = "set_option maxRecDepth 100000\nset_option maxHeartbeats 0\n"
    return f"{options}theorem tower : {statement} := {proof}\n"


def _number(n: int) -> str:
    """A term that no other number has a part in common with, but for the end."""
    text = "Nat.zero"
    for bit in f"{n:b}":
        text = f"(Nat.succ {text})" if bit == "1" else f"(id {text})"
    return text


async def measure(environment: Environment, name: str, text: str, times: int) -> None:
    """Prints one row."""
    judges = Judges(environment, slots=1)
    header = split_header(_HEADER)
    judged, compared = [], []
    try:
        if why := await judges.unavailable():
            raise SystemExit(why)
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            checks = [_compile(environment, where, text) for _ in range(times)]
            file = read_parts(Path(folder, "x.olean"))
        order: dict[str, object] = {
            "ending": ("", ""),
            "target_ending": ("", ""),
            "theorems": (),
            "holes": (),
        }
        order |= {"is_whole": False, "stand_in": "", "allowed": ()}
        nodes = 0
        for _ in range(times + 1):
            found = await judges.judge(header, file, ("", ""), _LIMITS)
            both = await judges.verify(header, file, file, order, _LIMITS)
            if not (found.proved and both.proved) or both.differences:
                raise SystemExit(f"{name}: {found} {both}")
            judged.append(found.cpu_s)
            compared.append(both.cpu_s - found.cpu_s)
            nodes = found.nodes
    finally:
        await judges.close()
    check_ms, judge_ms, compare_ms = (
        1000 * statistics.median(each) for each in (checks, judged[1:], compared[1:])
    )
    print(
        f"| {name} | {nodes:,} | {check_ms:,.0f} | {judge_ms:,.1f} | {compare_ms:,.1f} "
        f"| {judge_ms / check_ms:.3f} |",
        flush=True,
    )


def _compile(environment: Environment, folder: Path, text: str) -> float:
    """The CPU time of the plain check of a text, which leaves its file there."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*environment.toolchain.command, "-o", "x.olean", "--stdin"],
        input=f"{_HEADER}{text}".encode(),
        env=environment.process_env(),
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="runs of each text")
    parser.add_argument("--large", action="store_true", help="the largest text as well")
    given = parser.parse_args()
    environment = open_environment("default", None)
    started = time.monotonic()
    print("| text | nodes | check, CPU ms | judge, CPU ms | comparison, CPU ms | judge / check |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, text in texts(given.large):
        asyncio.run(measure(environment, name, text, given.times))
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
