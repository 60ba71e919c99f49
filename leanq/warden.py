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
                     {"start": {"argv", "env", "cwd", "limits", "report"}}
                         with the program's standard input, output and error as descriptors
                     {"limit": limits}, {"renew": limits}, {"stop": reason}
    inner → worker   {"isolation": [...]}, {"started": true} where a report is wanted,
                     {"renewed": cpu_s}, {"refused": text},
                     {"exit": {the fields of Exit}, "limited": whether it ever had limits}

Limits are {"cpu_s", "wall_s", "memory_bytes"}. They are null for a program that is to wait for its
input: until they come it is neither limited nor looked at, so that waiting costs nothing. What
hardly any program needs is not told, since each message wakes a process that has lost its caches.
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
_RESOURCES = 16  # that Linux knows limits of
_PROCESSES = 4096  # processes and threads of a slot, where they can be counted apart
# Between two samples, at least and at most: no longer than it takes one thread to break a limit, by
# CPU time or by the quickest growth of memory. Each sample costs the machine some 0.3 ms.
_CLOSE_LOOK_S, _LOOK_S = 0.025, 0.1
_GROWTH_BYTES_PER_S = 4 << 30
_CPU_SPARE_S = 5  # RLIMIT_CPU is the second line, for a warden that cannot run
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # it is the worker who decides
_DEFAULT = (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ)  # for programs; Python ignores these two
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

    def __init__(
        self, channel: socket.socket, hello: dict[str, Any], ruleset: int | None, *, inside: bool
    ) -> None:
        """``ruleset`` is for each program, unless this process stands ``inside`` of it."""
        self._channel = channel
        self._nice: int = hello["nice"]
        self._ruleset = ruleset
        self._inside = inside
        self._statuses: dict[int, int] = {}
        self._pid = os.getpid()
        self._own_limits = _own_limits()
        self._program = 0  # pid; 0 while nothing runs

    def serve(self, fatal: Iterable[int]) -> None:
        """Obey until the worker closes the socket, or one of the ``fatal`` pidfds reports."""
        self._poll = select.poll()
        for fd in (self._channel.fileno(), *fatal):
            self._poll.register(fd, select.POLLIN)
        while True:
            patience_ms = None
            if self._program and self._limited:
                patience_ms = max(0.0, min(self._look_at, self._wall_end) - time.monotonic()) * 1e3
            ready = {fd for fd, _ in self._poll.poll(patience_ms)}
            if not ready.isdisjoint(fatal):
                return
            # Its end comes before any order: limits must not seem to have reached the dead.
            if self._program and self._pidfd in ready:
                self._finish(None)
            if self._channel.fileno() in ready and not self._obey():
                return
            if self._program and self._limited:
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
        # The program may have ended while these were under way.
        elif "limit" in order and self._program:
            self._renew(order["limit"])
        elif "renew" in order and self._program:
            _tell(self._channel, {"renewed": self._renew(order["renew"])})
        elif "stop" in order and self._program:
            self._finish(order["stop"])
        return bool(packet)

    def _start(self, order: dict[str, Any], fds: list[int]) -> None:
        self._statuses.clear()
        self._meter = Meter()
        try:
            pid = self._spawn(order, fds) if self._inside else self._fork(order, fds)
        except (OSError, ValueError) as error:
            _end_all(self._statuses)
            _tell(self._channel, {"refused": _cannot_start(order["argv"][0], error)})
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._program = pid
        self._pidfd = os.pidfd_open(pid)
        self._poll.register(self._pidfd, select.POLLIN)
        self._started = time.monotonic()
        self._cpu_base_s = 0.0
        self._limited = False
        if order["limits"]:
            self._limit(order["limits"])
        if order["report"]:
            _tell(self._channel, {"started": True})

    def _limit(self, limits: dict[str, Any]) -> None:
        self._limited = True
        self._started = time.monotonic()
        self._cpu_end_s: float = self._cpu_base_s + limits["cpu_s"]
        self._wall_end: float = self._started + limits["wall_s"]
        self._memory_bytes: int = limits["memory_bytes"]
        self._over = False
        self._look_at = self._started + self._pause_s()
        _, hard = resource.prlimit(self._program, resource.RLIMIT_CPU)
        soft = _cpu_rlimit(self._cpu_end_s, hard)
        resource.prlimit(self._program, resource.RLIMIT_CPU, (soft, hard))

    def _pause_s(self) -> float:
        """How long to the next sample."""
        cpu_s = self._cpu_end_s - self._meter.cpu_s
        memory_s = (self._memory_bytes - self._meter.memory_bytes) / _GROWTH_BYTES_PER_S
        return max(min(cpu_s, memory_s, _LOOK_S), _CLOSE_LOOK_S)

    def _renew(self, limits: dict[str, Any]) -> float:
        """Count afresh, against new limits; the CPU seconds spent until now."""
        self._meter.sample()
        spent_s = self._meter.cpu_s - self._cpu_base_s
        self._cpu_base_s = self._meter.cpu_s
        self._limit(limits)
        return spent_s

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
        over = self._meter.memory_bytes > self._memory_bytes
        if self._meter.cpu_s > self._cpu_end_s:
            self._finish("cpu")
        elif over and self._over:
            self._finish("memory")
        # Between fork and exec a child seems to have its parent's memory: look twice.
        self._over = over
        self._look_at = now + self._pause_s()

    def _finish(self, stopped: str | None) -> None:
        """End what is left of the program and report. Its status is the main process's."""
        _end_all(self._statuses)
        self._poll.unregister(self._pidfd)
        os.close(self._pidfd)
        status = os.waitstatus_to_exitcode(self._statuses[self._program])
        self._program = 0
        # The kernel lets any process of this user do that. Whoever did it is to have the trouble,
        # and not whoever comes next.
        if _own_limits() != self._own_limits:
            raise OSError("the program has lowered the limits of its warden")
        self._meter.conclude()
        if stopped is None and self._limited and self._meter.cpu_s > self._cpu_end_s:
            stopped = "cpu"  # or it would depend on when the last sample was taken
        report = {
            "code": status if status >= 0 else None,
            "signal": -status if status < 0 else None,
            "stopped": stopped,
            "cpu_s": self._meter.cpu_s,
            "wall_s": time.monotonic() - self._started,
            "peak_bytes": self._meter.peak_bytes,
        }
        _tell(self._channel, {"exit": report, "limited": self._limited})

    def _spawn(self, order: dict[str, Any], fds: list[int]) -> int:
        """Start the program from within its walls; its pid. A fork of this process, which would
        raise them after, costs a millisecond of CPU more. All descriptors but 0 to 2 close."""
        os.chdir(order["cwd"])
        argv: list[str] = order["argv"]
        pid = os.posix_spawn(
            argv[0],
            argv,
            order["env"],
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
            setsid=True,
            setsigdef=_DEFAULT,
        )
        if self._nice:  # of all threads that it may have by now
            os.setpriority(os.PRIO_PGRP, pid, self._nice)
        return pid

    def _fork(self, order: dict[str, Any], fds: list[int]) -> int:
        """Start the program where the walls would make this process its equal; its pid."""
        trouble, report = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            self._become(order, fds, report)
        os.close(report)
        with open(trouble, "rb") as file:  # ends when the program has taken over
            text = file.read()
        if text:
            raise OSError(*json.loads(text))
        return pid

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
            for signum in _DEFAULT:
                signal.signal(signum, signal.SIG_DFL)
            os.nice(self._nice)
            os.chdir(order["cwd"])
            if self._ruleset is not None:
                confine.landlock_restrict(self._ruleset)
            os.execve(argv[0], argv, order["env"])
        except OSError as error:
            os.write(report, json.dumps([error.errno, error.strerror, error.filename]).encode())
        except Exception as error:
            os.write(report, json.dumps([0, str(error)]).encode())
        os._exit(127)


def _cannot_start(program: str, error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return f"cannot start {program}: {error}"
    where = f" ({error.filename})" if error.filename not in (None, program) else ""
    return f"cannot start {program}: {error.strerror}{where}"


def _own_limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in range(_RESOURCES)]


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
    # As pid 1 it need not be kept apart by Landlock from a program: the kernel lets no signal from
    # below through to it, and nobody without privileges look into what is not dumpable.
    inside = "pid" in walls
    if inside and ruleset is not None:
        confine.landlock_restrict(ruleset)
    _tell(channel, {"isolation": isolation})
    Keeper(channel, hello, ruleset, inside=inside).serve(fatal)
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
