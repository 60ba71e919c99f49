"""A cgroup for the programs of each sandbox, if one (of version 2) is delegated to the worker.

In it the kernel itself counts a program's memory, unmapped parts included, and ends a program that
exceeds its limit between two samples. The verdict is ``memory`` either way. The cgroup counts all
that samples count, so it can only find more. Below the worker's own cgroup
stand::

    leanq-worker/     the worker: a cgroup that shares out memory has no processes itself
    leanq-TOKEN/      what one sandbox runs

A cgroup counts as delegated if this user owns it and is not root, if systemd has
marked it (``Delegate=yes``), or if it is a container's own and can be written to.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

# Measures a program with all its descendants: CPU time and memory. For the supervisor.

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Lines of /proc/PID/status: a program names itself in the first, and can put no newline there.
_KINDS = (b"\nRssAnon:", b"\nVmSwap:", b"\nVmPTE:", b"\nHugetlbPages:")
# The content of one process's pipes once its user's share of larger ones is taken: two pages behind
# each of as many descriptors as it may have (leanq.lean.sandbox.walls).
_PIPES_KB = 64 * 8
# The states of a thread that runs, or is ready to, or waits for a disk.
_WORKS = (b"R", b"D")
# The CPU time of a sample that is not the program's doing: one of some ten processes.
_FREE_SAMPLE_S = 0.001


def children(parent: str = "self") -> list[int]:
    """Returns a process's children, ended or not; raises OSError."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{parent}/task"):
        # The kernel gives a page at a time, so it is read to its end.
        with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
            found += map(int, file.read().split())
    return found


def descendants() -> Iterator[int]:
    """Yields every process below this one, older generations first if /proc must be walked. The pid
    1 of a namespace sees nothing but its descendants in its /proc."""
    if os.getpid() == 1:
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1")
        return
    queue = ["self"]
    for parent in queue:  # which grows meanwhile
        with contextlib.suppress(OSError):  # it may have ended
            for child in children(parent):
                queue.append(str(child))
                yield child


def stat_fields(pid: int | str) -> list[bytes]:
    """Returns the fields of /proc/PID/stat from the state on; raises OSError."""
    return _read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()


class UsageSampler:
    """The usage of all descendants since this was made, as of the last sample.

    CPU time is the larger of two sums, each of which can only miss something. One adds the times
    that parents inherit when they wait for a child, the other the times seen of each process
    itself. The first misses children that no process waits for, such as those of a killed
    namespace. The second misses processes that end between two samples.

    For a program with many processes, the time to look at them counts as its own. It could
    otherwise cost half a CPU by doing nothing.

    Memory is anonymous memory, resident or swapped out, with its page tables, and the possible
    content of pipes. Mapped files, such as .olean files, do not count: they are the page cache,
    shared by all processes. Pages shared after a fork count once for each process.

    ``first`` is a process below this one that is no part of the program, or 0. ``shared``: there
    can be shared memory outside the scratch folder, which counts then. ``tasks``: processes and
    threads, as of the last sample, the first among them.
    """

    def __init__(self, *, first: int = 0, shared: bool = True) -> None:
        self._first = first
        self._kinds = (*_KINDS, *([b"\nRssShmem:"] if shared else []))
        self.cpu_s = 0.0
        self.tasks = 0
        self.memory_bytes = 0
        self.peak_bytes = 0
        self._worked_at_s = time.monotonic()
        self._inherited_before_s = _inherited_s()
        self._own: dict[tuple[int, bytes], int] = {}  # ticks, by pid and start time
        self._gone = 0  # ticks of processes that are gone
        self._sampling_s = 0.0

    def sample(self) -> None:
        """Measures now: some 100 µs and another 50 µs for each process."""
        began_s = time.process_time()
        # Parents are read before their children, this process first. A child that is waited for in
        # between is then missed once; the other order would count it twice.
        inherited_s = _inherited_s() - self._inherited_before_s
        own: dict[tuple[int, bytes], int] = {}
        ticks = kilobytes = tasks = 0
        for pid in descendants():
            try:
                fields, status = stat_fields(pid), _read(f"/proc/{pid}/status")
            except OSError:
                continue  # it ended meanwhile
            user, system, waited_user, waited_system = map(int, fields[11:15])
            own[pid, fields[19]] = user + system
            ticks += user + system + waited_user + waited_system
            tasks += int(fields[17])
            if pid != self._first:
                if fields[0] == b"Z" and int(fields[17]) > 1:
                    status = _status_of_thread(pid)
                kilobytes += _PIPES_KB + sum(_kilobytes(status, kind) for kind in self._kinds)
        self.tasks = tasks
        self._sampling_s += max(0.0, time.process_time() - began_s - _FREE_SAMPLE_S)
        self._note(inherited_s + ticks / _TICKS_PER_S, own, kilobytes << 10)

    def waited_s(self) -> float:
        """Returns for how long no sample saw work, if no thread runs now or is ready to run."""
        for pid in descendants():
            with contextlib.suppress(OSError):  # it, or its thread, ended
                for task in os.listdir(f"/proc/{pid}/task"):
                    if stat_fields(f"{pid}/task/{task}")[0] in _WORKS:
                        return 0.0
        return time.monotonic() - self._worked_at_s

    def conclude(self) -> None:
        """Measures after all descendants have ended, without a look for them."""
        self._note(_inherited_s() - self._inherited_before_s, {}, 0)

    def _note(self, times_s: float, own: dict[tuple[int, bytes], int], memory_bytes: int) -> None:
        before = self._gone + sum(self._own.values())
        self._gone += sum(spent for who, spent in self._own.items() if who not in own)
        self._own = own
        seen = self._gone + sum(own.values())
        if seen > before:
            self._worked_at_s = time.monotonic()
        self.cpu_s = max(self.cpu_s, self._sampling_s + max(times_s, seen / _TICKS_PER_S))
        self.memory_bytes = memory_bytes
        self.peak_bytes = max(self.peak_bytes, memory_bytes)


def own_memory_bytes() -> int:
    """Returns the memory of this process, counted as by :class:`UsageSampler`."""
    status = _read("/proc/self/status")
    return sum(_kilobytes(status, kind) for kind in _KINDS) << 10


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _status_of_thread(pid: int) -> bytes:
    """Returns the memory of a process whose first thread has ended: only living ones show it."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return b""
    for task in tasks:
        with contextlib.suppress(OSError):
            status = _read(f"/proc/{pid}/task/{task}/status")
            if _KINDS[0] in status:
                return status
    return b""


def _inherited_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _kilobytes(status: bytes, name: bytes) -> int:
    start = status.find(name)  # absent in a process that has ended
    return 0 if start < 0 else int(status[start + len(name) : status.index(b"kB", start)])


_ROOT = Path("/sys/fs/cgroup")
_OF_WORKERS = "leanq-worker"
_MARKS = ("user.delegate", "trusted.delegate")
# Of memory.stat: what a sample of processes counts, and buffers of sockets, which it cannot see.
_COUNTED = ("anon", "pagetables", "sock")
# Above a program's limits: the kernel's memory for it, and mapped files in use.
_SPARE_BYTES = 64 << 20


@functools.cache
def delegated(root: Path = _ROOT, proc: Path = Path("/proc/self")) -> Path | None:
    """Returns the cgroup below which this process may make others that share out memory, or None.
    The first call moves the processes of its own cgroup one level down."""
    try:
        controllers = (root / "cgroup.controllers").read_text().split()
        [path] = [
            line[3:] for line in (proc / "cgroup").read_text().splitlines() if line[:3] == "0::"
        ]
        own = root / path.lstrip("/")
        own = own.parent if own.name == _OF_WORKERS else own
        if "memory" not in controllers or not _is_ours(own, root):
            return None
        _share_out(own)
    except (OSError, ValueError):
        return None
    return own


def _is_ours(own: Path, root: Path) -> bool:
    if not os.access(own / "cgroup.procs", os.W_OK):
        return False
    # The root of all cgroups has no limit.
    is_containers = own == root and (own / "memory.max").exists()
    owner = own.stat().st_uid
    return is_containers or (owner == os.geteuid() != 0) or any(_has(own, mark) for mark in _MARKS)


def _has(folder: Path, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(folder, mark) == b"1"
    return False


def _share_out(own: Path) -> None:
    """Has the cgroups below ``own`` count memory; raises OSError if they cannot."""
    workers = own / _OF_WORKERS
    workers.mkdir(exist_ok=True)
    for pid in (own / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (workers / "cgroup.procs").write_text(pid)
    (own / "cgroup.subtree_control").write_text("+memory")


def make() -> Path | None:
    above = delegated()
    if above is None:
        return None
    made = above / f"leanq-{os.urandom(8).hex()}"
    try:
        made.mkdir()
        # Half a program has no verdict.
        (made / "memory.oom.group").write_text("1")
    except OSError:
        remove(made)
        return None
    return made


def remove(made: Path | None) -> None:
    with contextlib.suppress(OSError):
        if made is not None:
            made.rmdir()


class Cgroup:
    """The cgroup of a sandbox's programs, for its supervisor. Without a folder nothing is counted
    or limited. ``peak_bytes``: the most memory seen for the current program."""

    def __init__(self, folder: str | None) -> None:
        """Opens the folder now, since it may be out of sight later; raises OSError."""
        self.peak_bytes = 0
        self._folder: int | None = None
        self._base_bytes = 0
        self._most_bytes = math.inf
        self._kills = 0
        if folder is not None:
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def begin(self) -> None:
        self.peak_bytes = self._base_bytes = 0
        self._most_bytes = math.inf
        self._kills = self._numbers("memory.events").get("oom_kill", 0)
        self._write("memory.max", "max")

    def enter(self) -> None:
        """Moves this process, and all that it will start, into the cgroup."""
        self._write("cgroup.procs", "0")

    def renew(self) -> None:
        """Memory held by now does not count against the limits to come."""
        self._base_bytes = self.held_bytes()

    def limit(self, memory_bytes: int, scratch_bytes: float) -> None:
        """Sets the limits. Files of a scratch folder in memory count for the kernel's limit, which
        is the last resort, and not for the program's."""
        self._most_bytes = self._base_bytes + memory_bytes
        most_bytes = self._most_bytes + scratch_bytes + _SPARE_BYTES
        self._write("memory.max", "max" if math.isinf(most_bytes) else str(int(most_bytes)))

    def held_bytes(self) -> int:
        stat = self._numbers("memory.stat")
        swapped = self._read("memory.swap.current").strip()
        held_bytes = sum(stat.get(name, 0) for name in _COUNTED) + int(swapped or 0)
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        return held_bytes

    def is_over(self) -> bool:
        return self.held_bytes() > self._most_bytes

    def has_killed(self) -> bool:
        """Returns whether the kernel has ended the program for its memory."""
        killed = self._numbers("memory.events").get("oom_kill", 0) > self._kills
        if killed and math.isfinite(self._most_bytes):
            self.peak_bytes = max(self.peak_bytes, int(self._most_bytes))
        return killed

    def _numbers(self, name: str) -> dict[str, int]:
        words = self._read(name).split()
        return dict(zip(words[::2], map(int, words[1::2]), strict=False))

    def _read(self, name: str) -> str:
        if self._folder is None:
            return ""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:  # such as that of swap, if there is none
            return ""
        with open(fd) as file:
            return file.read()

    def _write(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, dir_fd=self._folder)
        with open(fd, "w") as file:
            file.write(text)
