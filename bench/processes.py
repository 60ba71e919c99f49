"""Times commands, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Run(NamedTuple):
    """A command that succeeded: its wall seconds, its CPU seconds, and its output."""

    wall_s: float
    cpu_s: float
    said: bytes


def run(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    stdin: IO[bytes] | None = None,
    expected_code: int = 0,
) -> Run:
    """Runs a command in ``folder``, with these environment variables only."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with process(command, variables, folder, stdin=stdin, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = child.stdout.read()
        code = child.wait()
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code != expected_code:
        sys.exit(f"{command[-1]}: exit code {code}: {said[-2000:].decode()}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall_s, cpu_s, said)


@contextlib.contextmanager
def process(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in ``folder``; on leaving, ends it and all its processes.

    It has a session of its own, so that Ctrl-C reaches us alone and we choose the order of ends.
    """
    with subprocess.Popen(
        command, env=variables, cwd=folder, start_new_session=True, **streams
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGINT)
            for stream in filter(None, (child.stdout, child.stderr)):
                stream.read()  # ends with the last process that could write to it


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and all below it, ended ones too; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    ticks = sum(map(int, stat[stat.rindex(")") + 2 :].split()[11:15]))
    return ticks / _TICKS_PER_S + sum(map(cpu_s, children(pid)))


def descendants(pid: int) -> Iterator[int]:
    """Yields the processes below one."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Returns the children of a process; none if it has ended."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, tasks.read_text().split())
    return found
