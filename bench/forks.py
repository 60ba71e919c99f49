"""What a fork costs beside a Lean that starts, behind headers of many modules.

Generates small modules that one header imports, and runs one small theorem behind them: by a Lean
that starts for it, and by forks of a process that has imported them. No queue takes part. See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from places import new_place, print_table

from leanq.lean.environment import Environment
from leanq.lean.fork_server.server import Zygote
from leanq.lean.process import limits_of
from leanq.lean.sandbox.sandbox import Finished, Sandbox
from leanq.queue.requests import Request

_FIGURES = {
    "plain_ms": ("a Lean that starts, wall", "{:.1f} ms", ""),
    "fork_ms": ("a fork, wall", "{:.1f} ms", ""),
    "plain_cpu_ms": ("a Lean that starts, CPU", "{:.1f} ms", ""),
    "fork_cpu_ms": ("a fork, CPU", "{:.1f} ms", ""),
    "ratio": ("CPU of a Lean that starts / of a fork", "{:.2f}", ""),
    "import_ms": ("preloading, wall", "{:.0f} ms", ""),
    "zygote_mb": ("the preloaded process itself", "{:.1f} MB", ""),
    "open_ms": ("a sandbox behind it, wall", "{:.1f} ms", ""),
    "first_ms": ("its first check, wall", "{:.1f} ms", ""),
    "hundredth_ms": ("its 100th, wall", "{:.1f} ms", ""),
}
_THEOREM = "theorem leanq_bench (p : Prop) (h : p) : p := h\n"
_LIMITS = limits_of(Request("check", code="-", timeout_s=300, wall_s=600, memory_mb=8000))
_IMPORT = "import {}\n"

Figures = defaultdict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", type=int, default=0, help="modules behind the header")
    parser.add_argument("--rounds", type=int, default=15, help="checks each way")
    options = parser.parse_args()
    figures: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
        place = new_place(Path(folder))
        modules = Path(folder, "modules")
        modules.mkdir()
        began_s = time.monotonic()
        top = make_modules(place.environment, modules, options.modules)
        print(f"{options.modules} modules made in {time.monotonic() - began_s:.0f} s")
        environment = replace(
            place.environment, search_path=(*place.environment.search_path, modules)
        )
        asyncio.run(measure(environment, f"prelude\nimport {top}\n", options.rounds, figures))
    print_table(_FIGURES, figures)


def make_modules(environment: Environment, folder: Path, count: int) -> str:
    """Compiles so many modules of one definition each; the name of what imports all of them."""
    if not count:
        return "Core"
    names = [f"B{number}" for number in range(count)]
    for name in names:
        text = f"prelude\nimport Core\ndef bench{name} : Nat := Nat.zero\n"
        (folder / f"{name}.lean").write_text(text)
    (folder / "Top.lean").write_text("prelude\nimport Core\n" + "".join(map(_IMPORT.format, names)))
    command = [*environment.toolchain.command, "-R", str(folder), "-o"]
    variables = {**environment.process_env(), "LEAN_PATH": f"{environment.search_path[0]}:{folder}"}
    for each in (names, ["Top"]):
        at_once = ["xargs", "-P", str(os.cpu_count()), "-I{}"]
        subprocess.run(
            [*at_once, *command, "{}.olean", "{}.lean"],
            cwd=folder,
            env=variables,
            input="\n".join(each).encode(),
            check=True,
        )
    return "Top"


async def measure(environment: Environment, header: str, rounds: int, figures: Figures) -> None:
    """The text by both ways in turn, and then so often that a hundredth check has come."""
    toolchain = environment.toolchain
    command = [*toolchain.command, *environment.options, "-o", "Bench.olean", "--json", "--stdin"]
    arguments = command[len(toolchain.command) :]
    async with contextlib.AsyncExitStack() as stack:
        plain = await Sandbox.open(readable=environment.readable())
        stack.push_async_callback(plain.close)
        started_s = time.perf_counter()
        zygote = await Zygote.open(
            toolchain.shared_libraries, arguments, header, environment.process_env()
        )
        stack.push_async_callback(zygote.close)
        figures["import_ms"].append(1000 * (time.perf_counter() - started_s))
        figures["zygote_mb"].append(zygote.memory_bytes / 1e6)
        started_s = time.perf_counter()
        forked = await Sandbox.open(readable=environment.readable(), start=zygote.fork)
        stack.push_async_callback(forked.close)
        figures["open_ms"].append(1000 * (time.perf_counter() - started_s))
        for number in range(max(rounds, 100)):
            done, wall_ms = await _check(environment, forked, command, header)
            if number == 0:
                figures["first_ms"].append(wall_ms)
            if number == 99:
                figures["hundredth_ms"].append(wall_ms)
            if number >= rounds:
                continue
            _note(figures, "fork", done, wall_ms)
            _note(figures, "plain", *await _check(environment, plain, command, header))
            plain_ms, fork_ms = (figures[f"{way}_cpu_ms"][-1] for way in ("plain", "fork"))
            figures["ratio"].append(plain_ms / fork_ms)


async def _check(
    environment: Environment, sandbox: Sandbox, command: Sequence[str], header: str
) -> tuple[Finished, float]:
    """One run, and how long it took in ms."""
    sandbox.clear()
    started_s = time.perf_counter()
    done = await sandbox.run(
        command,
        env=environment.sandbox_env(sandbox.scratch),
        cwd=sandbox.scratch,
        limits=_LIMITS,
        stdin=(header + _THEOREM).encode(),
    )
    if done.exit.code != 0:
        sys.exit(f"a check ended with {done}")
    return done, 1000 * (time.perf_counter() - started_s)


def _note(figures: Figures, way: str, done: Finished, wall_ms: float) -> None:
    figures[f"{way}_ms"].append(wall_ms)
    figures[f"{way}_cpu_ms"].append(1000 * done.exit.cpu_s)


if __name__ == "__main__":
    main()
