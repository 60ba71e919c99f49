"""A cgroup for the programs of each sandbox, if one (of version 2) is delegated to the worker.

In it the kernel itself counts a program's memory, unmapped parts included, and ends a program that
exceeds its limit between two samples. The verdict is ``memory`` either way. The cgroup counts all
that :mod:`leanq.lean.sandbox.usage` counts, so it can only find more. Below the worker's own cgroup
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
from pathlib import Path

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
