"""The warden: a process beside the worker that starts programs, watches them and buries them.

It is two processes, so that either can go first::

    worker ── socket ──┐
      └─ outer         │   waits for inner; then ends what is left, removes its folders
           └─ inner ◄──┘   pid 1 of its own namespace where the machine allows it
                └─ program, one at a time, and whatever it starts

Inner ends everything when the worker closes the socket or dies, when outer dies, and after each
program. It sleeps in ``poll`` while nothing runs, and wakes at once when a program ends.

As pid 1 it is certain: the kernel kills a namespace with its pid 1, whoever killed that. Without
a pid namespace, both are subreapers and look for descendants in /proc. That leaves two holes:
a SIGKILL of outer *and* inner in the same moment, and a program that forks faster than the walk.
Without Landlock's signal scope (ABI 6), such a program can also kill its wardens itself.

``leanq.sandbox`` starts this file with an isolated Python, without the rest of the package, and
documents what is measured. Messages are JSON, one per packet::

    worker → inner   {"scratch", "folders", "readable", "hidden", "nice", "namespaces"}   once
                     {"start": {"argv", "env", "cwd", "cpu_s", "wall_s", "memory_bytes"}}
                         with the program's standard input, output and error as descriptors
                     {"renew": {"cpu_s", "wall_s", "memory_bytes"}}
                     {"stop": reason}
    inner → worker   {"isolation": [...]}, {"started": true}, {"renewed": cpu_s},
                     {"refused": text}, {"exit": {the fields of Exit}}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from leanq import confine
from leanq.meter import Meter, descendants

MESSAGE_BYTES = 1 << 18  # above what a socket buffer takes by default, so nothing is cut

_FILE_BYTES = 8 << 30  # the largest file that a program may write
_PROCESSES = 4096  # processes and threads of a slot, where they can be counted apart
# Between two samples, at first and later. Each costs a program some 0.2 ms; in the time between
# two it could take some 100 MB.
_CLOSE_LOOK_S, _LOOK_S = 0.025, 0.1
_CPU_SPARE_S = 5  # RLIMIT_CPU is the second line, for a warden that cannot run
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # it is the worker who decides
# The namespaces to try, best first. Containers may mask /proc, and then refuse a new one, or allow
# no mounts at all. A pid namespace without its own /proc is of no use: a program that looks itself
# up there, as Lean does, would find another.
_ATTEMPTS = (
    "user pid mount net ipc",
    "pid mount net ipc",
    "user mount net ipc",
    "user net ipc",
    "",
)
_BY_MIDDLE = ("user", "pid")  # they have to be there before inner is
_REFUSED = 3  # exit status: the machine does not allow these namespaces


def empty(folder: str) -> None:
    """Remove everything in ``folder``: no link is followed, unwritable folders do not hinder.

    A program can nest folders deeper than any path or stack reaches, so each is first moved to
    the top. Nobody else may be at work in ``folder``.
    """
    while True:
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            found = list(entries)
        if not found:
            return
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            with os.scandir(entry.path) as inside:
                for child in inside:
                    if child.is_dir(follow_symlinks=False):
                        os.chmod(child.path, 0o700)
                        os.rename(child.path, os.path.join(folder, os.urandom(12).hex()))
                    else:
                        os.unlink(child.path)
            os.rmdir(entry.path)


def _reap(statuses: dict[int, int]) -> bool:
    """Note the wait status of each child that has ended; False once there is no child at all."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            statuses[pid] = status
    except ChildProcessError:
        return False


def _end_all(statuses: dict[int, int]) -> None:
    """Kill and reap every process below this one."""
    while _reap(statuses):
        for pid in [-1] if os.getpid() == 1 else descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


class Keeper:
    """The inner process: obeys the worker and keeps one program within its limits."""

    def __init__(self, channel: socket.socket, hello: dict[str, Any], ruleset: int | None) -> None:
        self._channel = channel
        self._nice: int = hello["nice"]
        self._ruleset = ruleset
        self._statuses: dict[int, int] = {}
        self._pid = os.getpid()
        self._program = 0  # pid; 0 while nothing runs

    def serve(self, fatal: Iterable[int]) -> None:
        """Obey until the worker closes the socket, or one of the ``fatal`` pidfds reports."""
        self._poll = select.poll()
        for fd in (self._channel.fileno(), *fatal):
            self._poll.register(fd, select.POLLIN)
        while True:
            patience_ms = None
            if self._program:
                patience_ms = max(0.0, min(self._look_at, self._wall_end) - time.monotonic()) * 1e3
            ready = {fd for fd, _ in self._poll.poll(patience_ms)}
            if not ready.isdisjoint(fatal):
                return
            if self._channel.fileno() in ready and not self._obey():
                return
            if self._program and self._pidfd in ready:
                self._finish(None)
            elif self._program:
                self._look()

    def _obey(self) -> bool:
        """Carry out one order; False when the worker has gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 3)
        except OSError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        order = json.loads(packet) if packet else {}
        if "start" in order:
            self._start(order["start"], fds)
        # The program may have ended while these two were under way.
        elif "renew" in order and self._program:
            self._renew(order["renew"])
        elif "stop" in order and self._program:
            self._finish(order["stop"])
        return bool(packet)

    def _start(self, order: dict[str, Any], fds: list[int]) -> None:
        trouble, report = os.pipe2(os.O_CLOEXEC)
        self._statuses.clear()
        self._meter = Meter()
        pid = os.fork()
        if pid == 0:
            self._become(order, fds, report)
        for fd in (*fds, report):
            os.close(fd)
        with open(trouble, "rb") as file:  # ends when the program has taken over
            text = file.read().decode(errors="replace")
        if text:
            _end_all(self._statuses)
            _tell(self._channel, {"refused": text})
            return
        self._program = pid
        self._pidfd = os.pidfd_open(pid)
        self._poll.register(self._pidfd, select.POLLIN)
        self._started = time.monotonic()
        self._look_at = self._started + _CLOSE_LOOK_S
        self._cpu_base_s = 0.0
        self._limit(order)
        _tell(self._channel, {"started": True})

    def _limit(self, limits: dict[str, Any]) -> None:
        self._cpu_end_s: float = self._cpu_base_s + limits["cpu_s"]
        self._wall_end: float = time.monotonic() + limits["wall_s"]
        self._memory_bytes: int = limits["memory_bytes"]
        self._over = False

    def _renew(self, limits: dict[str, Any]) -> None:
        self._meter.sample()
        spent_s = self._meter.cpu_s - self._cpu_base_s
        self._cpu_base_s = self._meter.cpu_s
        self._limit(limits)
        _, hard = resource.prlimit(self._program, resource.RLIMIT_CPU)
        soft = _cpu_rlimit(self._cpu_end_s, hard)
        resource.prlimit(self._program, resource.RLIMIT_CPU, (soft, hard))
        _tell(self._channel, {"renewed": spent_s})

    def _look(self) -> None:
        """Take a sample if it is time, and end the program when a limit is broken."""
        now = time.monotonic()
        if now >= self._wall_end:
            self._finish("wall")
            return
        if now < self._look_at:
            return
        _reap(self._statuses)
        self._meter.sample()
        pause_s = min(max((now - self._started) / 4, _CLOSE_LOOK_S), _LOOK_S)
        over = self._meter.memory_bytes > self._memory_bytes
        if self._meter.cpu_s > self._cpu_end_s:
            self._finish("cpu")
        elif over and self._over:
            self._finish("memory")
        elif over:
            # Between fork and exec a child seems to have its parent's memory: look twice.
            pause_s = _CLOSE_LOOK_S
        self._over = over
        self._look_at = now + pause_s

    def _finish(self, stopped: str | None) -> None:
        """End what is left of the program and report. Its status is the main process's."""
        _end_all(self._statuses)
        self._poll.unregister(self._pidfd)
        os.close(self._pidfd)
        status = os.waitstatus_to_exitcode(self._statuses[self._program])
        self._program = 0
        self._meter.sample()  # nothing is alive: what remains is exact
        if stopped is None and self._meter.cpu_s > self._cpu_end_s:
            stopped = "cpu"  # or it would depend on when the last sample was taken
        report = {
            "code": status if status >= 0 else None,
            "signal": -status if status < 0 else None,
            "stopped": stopped,
            "cpu_s": self._meter.cpu_s,
            "wall_s": time.monotonic() - self._started,
            "peak_bytes": self._meter.peak_bytes,
        }
        _tell(self._channel, {"exit": report})

    def _become(self, order: dict[str, Any], fds: list[int], report: int) -> NoReturn:
        """Turn this fork into the program. All descriptors but 0 to 2 close on exec."""
        argv = order["argv"]
        try:
            os.setsid()
            confine.die_with_parent(signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            for signum in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (_cpu_rlimit(order["cpu_s"], hard), hard))
            os.nice(self._nice)
            os.chdir(order["cwd"])
            if self._ruleset is not None:
                confine.landlock_restrict(self._ruleset)
            os.execve(argv[0], argv, order["env"])
        except OSError as error:
            where = f" ({error.filename})" if error.filename not in (None, argv[0]) else ""
            os.write(report, f"cannot start {argv[0]}: {error.strerror}{where}".encode())
        except Exception as error:
            os.write(report, f"cannot start {argv[0]}: {error}".encode())
        os._exit(127)


def _cpu_rlimit(cpu_s: float, hard: int) -> int:
    soft = math.ceil(min(cpu_s, 1e9)) + _CPU_SPARE_S
    return soft if hard == resource.RLIM_INFINITY else min(soft, hard)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (value, value))


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def _inner(
    channel: socket.socket, hello: dict[str, Any], walls: list[str], fatal: list[int]
) -> int:
    """Take the last steps inside, then keep programs; the exit status of this process."""
    try:
        confine.unshare([wall for wall in walls if wall not in _BY_MIDDLE])
        if "pid" in walls:
            confine.mount_proc()
    except OSError:
        return _REFUSED
    isolation = [f"{wall}-ns" for wall in walls]
    if "mount" in walls:
        if confine.freeze_files(hello["scratch"]):
            isolation.append("read-only")
        for folder in hello["hidden"]:
            confine.cover(folder)
    ruleset = None
    if abi := confine.landlock_abi():
        ruleset = confine.landlock_ruleset(
            abi, writable=hello["scratch"], readable=hello["readable"], own_proc="pid" in walls
        )
        isolation.append(f"landlock-{abi}")
    if "user" in walls:  # elsewhere this would count the whole machine's processes of this user
        _lower(resource.RLIMIT_NPROC, _PROCESSES)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, _FILE_BYTES)
    confine.renounce_privileges()
    confine.adopt_orphans()
    if os.getpid() != 1 and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise OSError("this kernel has neither pid namespaces for us nor /proc/PID/task/*/children")
    _tell(channel, {"isolation": isolation})
    Keeper(channel, hello, ruleset).serve(fatal)
    return 0


def _middle(
    channel: socket.socket, hello: dict[str, Any], walls: list[str], fatal: list[int]
) -> int:
    """Enter the namespaces and leave inner in them, as a child of outer. Gone at once."""
    try:
        confine.unshare([wall for wall in walls if wall in _BY_MIDDLE])
    except OSError:
        return _REFUSED
    if os.fork() > 0:
        return 0
    status = 0
    try:
        status = _inner(channel, hello, walls, fatal)
    except Exception as error:
        _tell(channel, {"refused": f"{type(error).__name__}: {error}"})
    finally:
        _end_all({})
        os._exit(status)


def main() -> None:
    """The outer process. Its standard input is the socket to the worker."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    # A fork of the worker could hold the socket open, so the worker itself is watched as well.
    fatal = [os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())]
    packet = channel.recv(MESSAGE_BYTES)
    if not packet:
        return
    hello = json.loads(packet)
    confine.adopt_orphans()
    for walls in _ATTEMPTS if hello["namespaces"] else ("",):
        middle = os.fork()
        if middle == 0:
            os._exit(_middle(channel, hello, walls.split(), fatal))
        _, status = os.waitpid(middle, 0)
        if status == 0:
            _, status = os.waitpid(-1, 0)  # inner, our eldest child: the first to be found
        if os.waitstatus_to_exitcode(status) != _REFUSED:
            break
    _end_all({})
    for folder in hello["folders"]:
        with contextlib.suppress(OSError):  # the worker removes it too
            empty(folder)
            os.rmdir(folder)
