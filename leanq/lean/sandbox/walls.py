"""The walls around one program: the supervisor prepares some once, and each run gets others anew.

With a mount namespace, programs see a root of their own. It has what the system needs
(``isolation.SYSTEM``), the paths that they may read, a few devices, a /proc of their own processes,
and a scratch folder in memory. Each run begins with fresh namespaces and a fresh scratch folder.
``Walls.enter`` needs no exec behind it, so it serves a forked process as well.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Sequence

from leanq.errors import SandboxError
from leanq.lean.sandbox import isolation
from leanq.lean.sandbox.first_process import FirstProcess

# Processes and threads of a slot, besides two for each CPU, and the open files of each process. If
# they can be counted apart, the kernel refuses more, except to root; the monitor ends a program
# with more. All slots together must leave some of the machine's, and of the worker's user's, who
# runs all programs. With n files, each of these processes can watch n²/4 of them by epoll, and the
# user has some 220,000 for each GB.
_PROCESSES = 512
_OPEN_FILES = 64
_PENDING_SIGNALS = 256
_FILE_BYTES = 8 << 30  # the largest file that a program may write
_LINKS = 40


class Walls:
    """The walls around each program of one sandbox; its supervisor makes them in its namespaces.
    ``report``: the walls here, as in ``Sandbox.isolation``."""

    def __init__(
        self,
        namespaces: Collection[str],
        *,
        scratch: str,
        base: str,
        readable: Sequence[str],
        hidden: Sequence[str],
    ) -> None:
        """Makes the root, with ``scratch`` in it, on top of the folder ``base``; then the ruleset.
        Raises OSError if the machine does not allow one of these."""
        self._scratch = scratch
        self._filter = isolation.seccomp_filter()
        self.filtered = bool(self._filter)
        self.most_tasks = _PROCESSES + 2 * (os.cpu_count() or 1)
        self.own_pids = "pid" in namespaces
        self.own_root = "mount" in namespaces
        # The filter leaves nothing of System V for the next run.
        fresh = ("mount",) if self.filtered else ("ipc", "mount")
        self._fresh = [each for each in fresh if each in namespaces]
        self.report = [f"{namespace}-ns" for namespace in namespaces]
        if self.own_pids:
            self._outside = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        if self.own_root:
            isolation.keep_mounts()
            make_root(base, scratch, readable, own_proc=self.own_pids)
            for folder in hidden:
                isolation.cover(folder)
            self.report += ["root", "read-only"]
        self._ruleset: int | None = None
        if abi := isolation.landlock_abi():
            # Landlock looks at the folders above a mount, and not below its cover.
            writable = os.path.dirname(scratch) if self.own_root else scratch
            wanted = ["/"] if self.own_root else [*isolation.SYSTEM, *readable]
            there = [path for path in wanted if os.path.exists(path)]
            self._ruleset = isolation.landlock_ruleset(abi, writable=writable, readable=there)
            self.report.append(f"landlock-{abi}")
        if self.filtered:
            self.report.append("seccomp")
        if "user" in namespaces:  # elsewhere this would count all of this user's processes
            _lower(resource.RLIMIT_NPROC, self.most_tasks)
        _lower(resource.RLIMIT_NOFILE, _OPEN_FILES)
        _lower(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS)
        isolation.bar_privileges()
        _lower(resource.RLIMIT_CORE, 0)
        _lower(resource.RLIMIT_FSIZE, _FILE_BYTES)

    def fork(self, first: FirstProcess | None = None) -> tuple[int, int]:
        """Forks a process that is to ``enter``: in a pid namespace of its own if there can be one,
        and there the first one, or behind ``first``. Returns the pid of ``first`` or 0, and as
        ``os.fork`` does."""
        if not self.own_pids:
            return 0, os.fork()
        isolation.unshare(("pid",))
        first_pid = 0
        try:
            if first is not None:
                first_pid = first.start()
            pid = os.fork()
        except OSError:
            isolation.set_pid_namespace(self._outside)
            raise
        if pid:
            isolation.set_pid_namespace(self._outside)
        return first_pid, pid

    def enter(self) -> None:
        """Takes this process, which was forked for that, behind all walls, for good."""
        isolation.unshare(self._fresh)
        if self.own_pids:
            isolation.mount_proc(minimal=True)
        elif self.own_root:
            isolation.keep_own_proc(self._scratch)
        isolation.renounce_privileges()
        if self._ruleset is not None:
            isolation.landlock_restrict(self._ruleset)
        if self._filter:
            isolation.seccomp_restrict(self._filter)


def make_root(base: str, scratch: str, readable: Sequence[str], *, own_proc: bool) -> None:
    """Makes a root in memory and moves into it: ``isolation.SYSTEM`` and ``readable`` to read, each
    at its own path, devices, /proc, and an empty folder at ``scratch``."""
    isolation.mount_memory(base, mode="755", size_bytes=1 << 20)
    root = _Root(base)
    for path in sorted({*isolation.SYSTEM, *readable}, key=lambda path: path.count("/")):
        root.place(path)
    for device in isolation.DEVICES:
        root.make_file(device)
    for folder in (scratch, "/proc"):
        os.makedirs(base + folder)
    if own_proc:
        isolation.mount_proc(f"{base}/proc")
    isolation.freeze(base)
    for device in isolation.DEVICES:
        isolation.bind(device, base + device)
        isolation.freeze(base + device, devices=True)
    if not own_proc:
        isolation.bind("/proc", f"{base}/proc")
    isolation.change_root(base)


class _Root:
    def __init__(self, base: str) -> None:
        self._base = base
        self._bound: list[str] = []

    def place(self, path: str, links: int = _LINKS) -> None:
        """Shows the content at ``path`` there in the new root, with the links that lead to it."""
        if not os.path.exists(path) or links == 0:
            return
        here = ""
        parts = [part for part in path.split("/") if part]
        for at, part in enumerate(parts):
            here = f"{here}/{part}"
            if here == "/proc" or self._holds(here):
                return
            if os.path.islink(here):
                target = os.readlink(here)
                if not os.path.lexists(self._base + here):
                    os.symlink(target, self._base + here)
                found = os.path.join(os.path.dirname(here), target)
                self.place(os.path.normpath(os.path.join(found, *parts[at + 1 :])), links - 1)
                return
            if at < len(parts) - 1:
                os.makedirs(self._base + here, exist_ok=True)
        if os.path.isdir(here):
            os.makedirs(self._base + here, exist_ok=True)
        else:
            self.make_file(here)
        isolation.bind(here, self._base + here)
        self._bound.append(here)

    def make_file(self, path: str) -> None:
        """Makes an empty file, over which another can be bound."""
        os.makedirs(os.path.dirname(self._base + path), exist_ok=True)
        os.close(os.open(self._base + path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC))

    def _holds(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in self._bound)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (value, value))


# The walls that a program should stand behind, and the remedy if the machine gives fewer.

_ALLOW_NAMESPACES = (
    "allow user namespaces: sysctl user.max_user_namespaces above 0, on Debian "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container the seccomp profile deploy/seccomp.json"
)
_OWN_PROC = (
    "in a container unmask /proc: systempaths=unconfined in Docker, procMount: Unmasked with "
    "hostUsers: false in Kubernetes"
)
_LANDLOCK = "Linux 5.13 or later with landlock among its LSMs (/sys/kernel/security/lsm)"
_SECCOMP = "Linux with seccomp filters (CONFIG_SECCOMP_FILTER), on x86-64 or aarch64"

_WANTED = {
    "user-ns": _ALLOW_NAMESPACES,
    "mount-ns": _ALLOW_NAMESPACES,
    "net-ns": _ALLOW_NAMESPACES,
    "ipc-ns": _ALLOW_NAMESPACES,
    "pid-ns": _OWN_PROC,
    "landlock": _LANDLOCK,
    "seccomp": _SECCOMP,
}


def missing_walls(isolation: Sequence[str]) -> list[str]:
    """Returns the wanted walls that a ``Sandbox.isolation`` lacks."""
    there = {each.split("-")[0] if each.startswith("landlock-") else each for each in isolation}
    return [wall for wall in _WANTED if wall not in there]


def advice(missing: Sequence[str]) -> str:
    """Returns what an operator can do to have them."""
    # User namespaces bring most of them, so a single sentence names that step.
    wanted = [wall for wall in missing if wall != "pid-ns" or "user-ns" not in missing]
    return "; ".join(dict.fromkeys(_WANTED[wall] for wall in wanted))


def require_walls(isolation: Sequence[str]) -> None:
    """Raises SandboxError with the missing walls, and the remedy."""
    if missing := missing_walls(isolation):
        raise SandboxError(
            f"--require-walls: this machine's sandbox lacks {', '.join(missing)}: {advice(missing)}"
        )
