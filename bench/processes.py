"""Times commands, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# What stands in their commands.
_ROLES = ("supervisor", "judge_process", "zygote")


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
    return sum(_used_s(pid)) + sum(map(cpu_s, children(pid)))


def cpu_by_role_s(worker: int) -> Counter[str]:
    """Returns the CPU seconds of a worker, its supervisors, judge, zygotes and Lean, without those
    of processes that end meanwhile."""
    found: Counter[str] = Counter()
    found["worker"], _ = _used_s(worker)
    for child in children(worker):
        _add_roles(found, child, "")
    return found


def _add_roles(found: Counter[str], pid: int, parent: str) -> None:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        role = next((each for each in _ROLES if each.encode() in command), "Lean")
        # A fork has its parent's command.
        forked = {"judge_process": "judge's forks", "zygote": "Lean"}
        below = forked.get(role, "Lean")
        own_s, ended_s = _used_s(pid)
        found[below if role == parent and role in forked else role] += own_s
        found[below] += ended_s
        for child in children(pid):
            _add_roles(found, child, role)


def _used_s(pid: int) -> tuple[float, float]:
    """Returns the CPU seconds of a process, and of its ended children; zeros if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    own, own_system, ended, ended_system = map(int, stat[stat.rindex(")") + 2 :].split()[11:15])
    return (own + own_system) / _TICKS_PER_S, (ended + ended_system) / _TICKS_PER_S


def used(word: str) -> Iterator[tuple[float, float]]:
    """Yields the CPU seconds and private megabytes of our processes with this word."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if word.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            # Any process may share a file's pages; those of a new file are dirty as well.
            [own] = (line for line in lines if line.startswith("Anonymous:"))
            yield sum(map(int, ticks)) / _TICKS_PER_S, int(own.split()[1]) / 1e3


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
