"""Measures a full library: each of its modules judged, and headers imported.

The library is that of the tests (``LEANQ_TEST_LIBRARY``, or one built in the cache folder). Each
module is judged behind its own imports. tests/support/lean/judged_modules.py names the modules that
cannot be judged. If a library hides its proofs, the judge gets the copy that has them as axioms.
Prints tables.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from processes import used

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judges
from leanq.lean.run.olean import read_parts
from leanq.lean.run.zygote_client import HeaderFailsError, Zygote
from leanq.lean.text import Header, split_header

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.lean.judged_modules import LIMITS, Judged, Modules, judge_modules
from support.lean.libraries import NoLibraryError, judged_folder, layouts, library

_HEADERS = (
    "prelude\nimport Std.Data.TreeMap\n",
    "import Init\n",
    "import Std\n",
    "import Lean\n",
    "import Lean\nimport Lake\n",
)


def print_judged(judged: Sequence[Judged]) -> None:
    """Prints the results of the modules, and names those that the judge refuses."""
    proved = [each for each in judged if each.found.proved]
    print("| judge over the library | |\n| --- | --- |")
    constants = sum(each.constants for each in proved)
    cpu_s = sum(each.found.cpu_s for each in proved)
    for said, count in collections.Counter(each.said for each in judged).most_common():
        print(f"| modules: {said} | {count:,} |")
    print(f"| constants in the proved ones | {constants:,} |")
    print(f"| CPU per constant | {1000 * cpu_s / max(constants, 1):.2f} ms |")
    most = max(judged, key=lambda each: each.found.peak_bytes)
    print(f"| most memory of a judge's child | {most.found.peak_bytes >> 20} MB ({most.name}) |")
    largest = max(judged, key=lambda each: each.size_bytes)
    print(f"| largest file | {largest.size_bytes / 1e6:.1f} MB ({largest.name}) |")
    slowest = max(judged, key=lambda each: each.found.cpu_s)
    print(f"| slowest | {slowest.found.cpu_s:.1f} s of CPU ({slowest.name}) |\n")
    for each in judged:
        if not each.found.proved and not each.lacks:
            print(f"{each.said}: {each.name}: {each.found.text or each.found.limit}")


async def print_headers(environment: Environment, imported: Modules) -> None:
    """Prints the cost of importing headers, for the judge and for the process that forks."""
    print(
        "| header | modules | judge: CPU s | private MB | fork server: CPU s | private MB "
        "| counted MB |"
    )
    print(f"|{' --- |' * 7}")
    for text in _HEADERS:
        header = split_header(text)
        if any(environment.find_olean(each) is None for each in header.imports):
            continue
        unasked = () if header.is_prelude else ("Init",)
        count = len(imported.closure((*unasked, *header.imports)))
        with tempfile.TemporaryDirectory() as folder:
            judge_s, judge_mb = await _judge_import(environment, header, text, Path(folder))
        zygote = await _zygote_import(environment, text)
        said = text.strip().replace("\n", "; ")
        print(f"| `{said}` | {count:,} | {judge_s:.2f} | {judge_mb:.0f} ", end="")
        if isinstance(zygote, str):
            print(f"| {zygote} | | |", flush=True)
        else:
            fork_s, fork_mb, counted_bytes = zygote
            print(f"| {fork_s:.2f} | {fork_mb:.0f} | {counted_bytes >> 20} |", flush=True)


async def _judge_import(
    environment: Environment, header: Header, text: str, folder: Path
) -> tuple[float, float]:
    """Returns what a judge's process used and holds after it judged one small file."""
    source, olean = folder / "x.lean", folder / "x.olean"
    source.write_text(f"{text}theorem leanq_bench (p : Prop) (h : p) : p := h\n")
    command = [*environment.toolchain.command, "-o", olean.name, source.name]
    variables = environment.process_env()
    process = await asyncio.create_subprocess_exec(*command, env=variables, cwd=folder)
    if await process.wait():
        raise SystemExit(f"Lean does not compile a text behind {text!r}")
    judges = Judges(environment, slots=1)
    try:
        if why := await judges.unavailable():
            raise SystemExit(why)
        found = await judges.judge(header, read_parts(olean), ("", ""), LIMITS)
        if not found.proved:
            raise SystemExit(f"{text!r}: {found}")
        return max(used("judge_process"))
    finally:
        await judges.close()


async def _zygote_import(environment: Environment, text: str) -> tuple[float, float, int] | str:
    """Returns the same for the process that forks, and the bytes that the budget counts.

    Returns the reason instead if there is no such process.
    """
    toolchain = environment.toolchain
    try:
        zygote = await Zygote.open(
            toolchain.prefix and toolchain.prefix / "bin" / "lean",
            toolchain.shared_libraries,
            environment.command()[len(toolchain.command) :],
            text,
            environment.process_env(),
        )
    except HeaderFailsError as error:
        return f"does not serve here: {error}"
    try:
        return *max(used("zygote")), zygote.memory_bytes
    finally:
        await zygote.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="judge one of so many modules")
    parser.add_argument("--slots", type=int, default=os.cpu_count())
    parser.add_argument("--headers", action="store_true", help="measure the imports alone")
    given = parser.parse_args()
    started_s = time.monotonic()
    try:
        toolchain = library(layouts()[0])
        judged = judged_folder()
    except NoLibraryError as error:
        raise SystemExit(f"no library to measure with: {error}") from None
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as cache:
        environment = toolchain.open(Path(cache))
        asyncio.run(print_headers(environment, Modules(environment, toolchain.folder)))
        if not given.headers:
            if judged:
                environment = replace(environment, search_path=(judged,))
            whole = Modules(environment, judged or toolchain.folder)
            modules = whole.names[:: given.every]
            print()
            print_judged(asyncio.run(judge_modules(whole, modules, given.slots)))
    load = os.getloadavg()[1]
    print(f"\n{time.monotonic() - started_s:.0f} s; load {load:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
