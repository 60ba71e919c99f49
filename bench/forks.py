"""Compares the cost of a fork with that of a Lean that starts, behind headers of many modules.

Makes small modules that one header imports, and runs one small theorem behind them. It runs in a
Lean that starts for it, and in forks of a process that has imported the modules. No queue takes
part. See README.md beside this file.
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
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

from places import new_place, print_table
from processes import descendants

from leanq.lean.environment import Environment
from leanq.lean.run.process import limits_of
from leanq.lean.run.zygote_client import Zygote
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
    "plain_private_mb": ("private memory of a Lean that starts, 20 theorems", "{:.1f} MB", ""),
    "fork_private_mb": ("private memory of a fork, 20 theorems", "{:.1f} MB", ""),
    "private": ("private memory of a fork / of a Lean that starts", "{:.2f}", ""),
}
_THEOREM = "theorem leanq_bench (p : Prop) (h : p) : p := h\n"
_LIMITS = limits_of(Request("check", code="-", timeout_s=300, wall_s=600, memory_mb=8000))
# Twenty theorems take long enough to be observed.
_THEOREMS = "".join(f"theorem leanq_bench{n} (p : Prop) (h : p) : p := h\n" for n in range(20))
_IMPORT = "import {}\n"
# Has Lean's own function save an empty module under many names, each mapped at its own address.
# Runs in a process of its own, since Lean cannot be unloaded.
_SAVE_EMPTY = """
import ctypes, sys
from leanq.lean.judge.kernel import Kernel
folder, count, *libraries = sys.argv[1:]
Kernel(libraries)
lean = ctypes.CDLL(None)
def function(name, arity):
    found = lean[name]
    found.argtypes, found.restype = [ctypes.c_void_p] * arity, ctypes.c_void_p
    return found
def string(text):
    return lean.lean_mk_string(text.encode())
def value(result):
    assert ctypes.c_uint8.from_address(result + 7).value == 0, "Lean says no"
    return ctypes.c_uint64.from_address(result + 8).value
lean.lean_mk_string.argtypes, lean.lean_mk_string.restype = [ctypes.c_char_p], ctypes.c_void_p
name, read, save = (function(f"l_Lean_{each}", arity) for each, arity in (
    ("Name_mkSimple", 1), ("readModuleData", 1), ("saveModuleData", 3)))
pair = value(read(string(f"{folder}/E.olean")))
data = ctypes.c_uint64.from_address(pair + 8).value
lean.lean_mark_persistent(ctypes.c_void_p(data))
for number in range(int(count)):
    value(save(string(f"{folder}/E{number}.olean"), name(string(f"E{number}")), data))
"""

Figures = defaultdict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", type=int, default=0, help="modules behind the header")
    parser.add_argument("--empty", type=int, default=0, help="modules besides that declare nothing")
    parser.add_argument("--rounds", type=int, default=15, help="checks each way")
    parser.add_argument("--keep", metavar="FOLDER", help="where modules are kept for the next run")
    options = parser.parse_args()
    figures: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
        place = new_place(Path(folder))
        name = f"{options.modules}-{options.empty}"
        modules = Path(options.keep or folder, "modules", name).resolve()
        top = "Core" if not options.modules + options.empty else "Top"
        if top == "Top" and not (modules / "Top.olean").exists():
            modules.mkdir(parents=True)
            began_s = time.monotonic()
            make_modules(place.environment, modules, options.modules, options.empty)
            print(f"modules made in {time.monotonic() - began_s:.0f} s")
        environment = replace(
            place.environment, search_path=(*place.environment.search_path, modules)
        )
        asyncio.run(measure(environment, f"prelude\nimport {top}\n", options.rounds, figures))
    print_table(_FIGURES, figures)


def make_modules(environment: Environment, folder: Path, count: int, empty: int) -> None:
    """Makes modules of one definition each, empty modules, and `Top`, which imports all of them."""
    names = [f"B{number}" for number in range(count)]
    for name in names:
        text = f"prelude\nimport Core\ndef bench{name} : Nat := Nat.zero\n"
        (folder / f"{name}.lean").write_text(text)
    (folder / "E.lean").write_text("prelude\nimport Core\n")
    imports = [*names, *(f"E{number}" for number in range(empty))]
    top = "prelude\nimport Core\n" + "".join(map(_IMPORT.format, imports))
    (folder / "Top.lean").write_text(top)
    toolchain = environment.toolchain
    command = [*toolchain.command, "-R", str(folder), "-o"]
    variables = {**environment.process_env(), "LEAN_PATH": f"{environment.search_path[0]}:{folder}"}
    at_once = ["xargs", "-P", str(os.cpu_count()), "-I{}", *command, "{}.olean", "{}.lean"]
    for each in ([*names, "E"], ["Top"]):
        if each == ["Top"] and empty:
            libraries = map(str, toolchain.shared_libraries)
            arguments = [str(folder), str(empty), *libraries]
            subprocess.run([sys.executable, "-c", _SAVE_EMPTY, *arguments], check=True)
        given = "\n".join(each).encode()
        subprocess.run(at_once, cwd=folder, env=variables, input=given, check=True)


async def measure(environment: Environment, header: str, rounds: int, figures: Figures) -> None:
    """Runs the text both ways in turn, and goes on up to a hundredth check."""
    toolchain = environment.toolchain
    command = environment.command(("-o", "Bench.olean"))
    arguments = environment.command()[len(toolchain.command) :]
    async with contextlib.AsyncExitStack() as stack:
        plain = await Sandbox.open(readable=environment.readable())
        stack.push_async_callback(plain.close)
        started_s = time.perf_counter()
        zygote = await Zygote.open(
            None, toolchain.shared_libraries, arguments, header, environment.process_env()
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
        for _ in range(5):
            for way, sandbox in (("plain", plain), ("fork", forked)):
                checked = _check(environment, sandbox, command, header, _THEOREMS)
                figures[f"{way}_private_mb"].append(await _most_private_mb(sandbox, checked))
            plain_mb, fork_mb = (figures[f"{way}_private_mb"][-1] for way in ("plain", "fork"))
            figures["private"].append(fork_mb / plain_mb)


async def _most_private_mb(sandbox: Sandbox, checked: Coroutine[None, None, object]) -> float:
    """Returns the most private memory that a process of the sandbox held during a check, in MB."""
    running, most = asyncio.create_task(checked), 0
    while not running.done():
        most = max([most, *map(_private_bytes, descendants(sandbox.supervisor.pid))])
        await asyncio.sleep(0.002)
    await running
    return most / 1e6


def _private_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    return 0


async def _check(
    environment: Environment,
    sandbox: Sandbox,
    command: Sequence[str],
    header: str,
    text: str = _THEOREM,
) -> tuple[Finished, float]:
    """Returns one run and its time in ms."""
    sandbox.clear()
    started_s = time.perf_counter()
    done = await sandbox.run(
        command,
        env=environment.sandbox_env(sandbox.scratch),
        limits=_LIMITS,
        stdin=(header + text).encode(),
    )
    if done.exit.code != 0:
        sys.exit(f"a check ended with {done}")
    return done, 1000 * (time.perf_counter() - started_s)


def _note(figures: Figures, way: str, done: Finished, wall_ms: float) -> None:
    figures[f"{way}_ms"].append(wall_ms)
    figures[f"{way}_cpu_ms"].append(1000 * done.exit.cpu_s)


if __name__ == "__main__":
    main()
