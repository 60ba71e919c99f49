"""Lean files in folders of their own, and two ways to run them: plain ``xargs``, and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Run, process, run
from queues import Queue

import leanq
from leanq.lean.environment import Environment, open_environment
from leanq.queue.settings import Settings

LEANQ = (sys.executable, "-c", "from leanq.cli import main; main()")


@dataclass(frozen=True)
class Place:
    """A user with folders of its own."""

    files: Path
    environment: Environment
    variables: dict[str, str]

    def write(self, name: str, *commands: str, header: str = "prelude\nimport Core") -> None:
        """Writes a Lean file of these commands; ``name`` is without ``.lean``."""
        text = "\n\n".join(filter(None, (header, *commands)))
        (self.files / f"{name}.lean").write_text(f"{text}\n")


def new_place(folder: Path, library: Path | None = None) -> Place:
    """Finds the Lean that both sides use: a toolchain's, or else the wheel's, with Core."""
    for name in ("cache", "files", "home", "tmp"):
        (folder / name).mkdir()
    variables = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(leanq.__file__).parents[1]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "LEANQ_CACHE": str(folder / "cache"),
    }
    if library:
        variables["LEANQ_LEAN"] = str(library.absolute() / "bin" / "lean")
    environment = open_environment("default", None, environ=variables)
    return Place(folder / "files", environment, variables)


def statement(number: int) -> str:
    """Returns a small statement that no other number has, with its proof by tactics."""
    left, middle, right = f"p{number}", "q", f"r{number % 7}"
    return (
        f"({left} {middle} {right} : Prop) :\n"
        f"    And {left} (And {middle} {right}) → And (And {right} {middle}) {left} := by\n"
        "  intro h\n  constructor\n  constructor\n"
        "  exact h.right.right\n  exact h.right.left\n  exact h.left"
    )


def lean(place: Place) -> tuple[list[str], dict[str, str]]:
    """Returns the driver's command line and variables for Lean, without file names."""
    environment, scratch = place.environment, place.variables["TMPDIR"]
    command = [*environment.toolchain.command, *environment.options, "--json", "-o"]
    return command, {**environment.process_env(), "HOME": scratch, "TMPDIR": scratch}


def xargs(place: Place, names: list[str], at_once: int) -> Run:
    """Runs Lean on these files."""
    (command, variables), scratch = lean(place), place.variables["TMPDIR"]
    command = ["xargs", "-P", str(at_once), "-I{}", *command, f"{scratch}/{{}}.olean", "{}.lean"]
    with tempfile.TemporaryFile() as file:
        file.write("\n".join(names).encode())
        file.seek(0)
        done = run(command, variables, place.files, file)
    for name in names:
        Path(scratch, f"{name}.olean").unlink()
    return done


@contextlib.contextmanager
def worker(place: Place, variables: Mapping[str, str], *options: str) -> Iterator[int]:
    """Starts a worker; yields its pid once it is ready."""
    command = [*LEANQ, "worker", *options]
    with process(command, variables, place.files, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        if not any(b" serves " in line for line in child.stderr):
            sys.exit("the worker does not start")
        yield child.pid


def server_info(url: str) -> Mapping[str, Any]:
    """Returns the server's INFO."""

    async def ask() -> Mapping[str, Any]:
        queue = Queue(Settings(url=url))
        try:
            return await queue.ping()
        finally:
            await queue.close()

    return asyncio.run(ask())


def print_table(
    kinds: Mapping[str, tuple[str, str, str]], figures: Mapping[str, Sequence[float]]
) -> None:
    """Prints the measured figures; ``figures`` has each one's title, format and target by name."""
    print("| figure | median | target | lowest – highest |\n| --- | --- | --- | --- |")
    for name, (what, form, target) in kinds.items():
        if each := figures.get(name):
            middle, *ends = map(form.format, (f(each) for f in (statistics.median, min, max)))
            print(f"| {what} | {middle} | {target} | {' – '.join(ends)} |")
