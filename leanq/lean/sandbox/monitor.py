"""What the inner supervisor does: it keeps one program at a time within its limits.

See :mod:`leanq.lean.sandbox.supervisor`, which has the messages.
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

from leanq.lean.sandbox import isolation
from leanq.lean.sandbox.usage import UsageSampler, descendants, disk_bytes

MESSAGE_BYTES = 1 << 18  # above what a socket buffer takes by default, so nothing is cut

# Between two samples passes no more time than one thread takes to break a limit, by CPU time or by
# the quickest growth of memory; and at least this, as each costs the machine some 0.3 ms.
_CLOSE_LOOK_S = 0.025
_GROWTH_BYTES_PER_S = 4 << 30
_CPU_SPARE_S = 5  # RLIMIT_CPU is the second line, for a supervisor that cannot run
_RESOURCES = 16  # that Linux knows limits of
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # it is the worker who decides
_DEFAULT = (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ)  # for programs; Python ignores these two


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


def end_all(statuses: dict[int, int]) -> None:
    """Kill and reap every process below this one."""
    while _reap(statuses):
        for pid in [-1] if os.getpid() == 1 else descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


class Monitor:
    """The inner process: obeys the worker and keeps one program within its limits."""

    def __init__(
        self, channel: socket.socket, hello: dict[str, Any], ruleset: int | None, *, inside: bool
    ) -> None:
        """``ruleset`` is for each program, unless this process stands ``inside`` of it."""
        self._channel = channel
        self._nice: int = hello["nice"]
        self._scratch: str = hello["scratch"]
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
            timeout_ms = None
            if self._program and self._limited:
                timeout_ms = max(0.0, min(self._look_at, self._wall_end) - time.monotonic()) * 1e3
            ready = {fd for fd, _ in self._poll.poll(timeout_ms)}
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
        elif "limit" in order and self._program and not _is_dying(self._program):
            self._usage.sample()
            self._renew(order["limit"], held_bytes=0)
        elif "renew" in order and self._program:
            self._usage.sample()
            held_bytes = self._usage.memory_bytes
            cpu_s = self._renew(order["renew"], held_bytes=held_bytes)
            tell(self._channel, {"renewed": {"cpu_s": cpu_s, "memory_bytes": held_bytes}})
        elif "stop" in order and self._program:
            self._finish(order["stop"])
        return bool(packet)

    def _start(self, order: dict[str, Any], fds: list[int]) -> None:
        self._statuses.clear()
        self._usage = UsageSampler()
        try:
            pid = self._spawn(order, fds) if self._inside else self._fork(order, fds)
        except (OSError, ValueError) as error:
            end_all(self._statuses)
            tell(self._channel, {"refused": _cannot_start(order["argv"][0], error)})
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
            self._limit(order["limits"], held_bytes=0)
        if order["report"]:
            tell(self._channel, {"started": True})

    def _limit(self, limits: dict[str, Any], *, held_bytes: int) -> None:
        self._limited = True
        self._started = time.monotonic()
        self._cpu_end_s: float = self._cpu_base_s + limits["cpu_s"]
        self._wall_end: float = self._started + limits["wall_s"]
        self._memory_bytes: int = held_bytes + limits["memory_bytes"]
        self._look_s: float = limits["look_s"]
        self._scratch_bytes: float = limits["scratch_bytes"]
        self._over = False
        self._look_at = self._started + self._pause_s()
        _, hard = resource.prlimit(self._program, resource.RLIMIT_CPU)
        soft = _cpu_rlimit(self._cpu_end_s, hard)
        resource.prlimit(self._program, resource.RLIMIT_CPU, (soft, hard))

    def _pause_s(self) -> float:
        """How long to the next sample."""
        cpu_s = self._cpu_end_s - self._usage.cpu_s
        memory_s = (self._memory_bytes - self._usage.memory_bytes) / _GROWTH_BYTES_PER_S
        return max(min(cpu_s, memory_s, self._look_s), _CLOSE_LOOK_S)

    def _renew(self, limits: dict[str, Any], *, held_bytes: int) -> float:
        """Count afresh, against new limits; the CPU seconds spent until now. What it holds already
        is no part of its memory's limit. To be called after a sample."""
        spent_s = self._usage.cpu_s - self._cpu_base_s
        self._cpu_base_s = self._usage.cpu_s
        self._limit(limits, held_bytes=held_bytes)
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
        self._usage.sample()
        over = self._usage.memory_bytes > self._memory_bytes
        if self._usage.cpu_s > self._cpu_end_s:
            self._finish("cpu")
        elif over and self._over:
            self._finish("memory")
        elif self._disk_bytes() > self._scratch_bytes:
            self._finish("scratch")
        # Between fork and exec a child seems to have its parent's memory: look twice.
        self._over = over
        self._look_at = now + self._pause_s()

    def _disk_bytes(self) -> float:
        """What the scratch folder takes, where that is limited."""
        if math.isinf(self._scratch_bytes):
            return 0.0
        return disk_bytes(self._scratch, self._scratch_bytes)

    def _finish(self, stopped: str | None) -> None:
        """End what is left of the program and report. Its status is the main process's."""
        end_all(self._statuses)
        self._poll.unregister(self._pidfd)
        os.close(self._pidfd)
        status = os.waitstatus_to_exitcode(self._statuses[self._program])
        self._program = 0
        # The kernel lets any process of this user do that. The request whose program did it has to
        # fail, not the next one.
        if _own_limits() != self._own_limits:
            raise OSError("the program has lowered the limits of its supervisor")
        self._usage.conclude()
        if stopped is None and self._limited and self._usage.cpu_s > self._cpu_end_s:
            stopped = "cpu"  # or it would depend on when the last sample was taken
        written_bytes = self._disk_bytes() if self._limited else 0.0
        if stopped is None and self._limited and written_bytes > self._scratch_bytes:
            stopped = "scratch"
        report = {
            "code": status if status >= 0 else None,
            "signal": -status if status < 0 else None,
            "stopped": stopped,
            "cpu_s": self._usage.cpu_s,
            "wall_s": time.monotonic() - self._started,
            "peak_bytes": self._usage.peak_bytes,
            "scratch_bytes": int(min(written_bytes, 1 << 62)),
        }
        tell(self._channel, {"exit": report, "limited": self._limited})

    def _spawn(self, order: dict[str, Any], fds: list[int]) -> int:
        """Start the program from this process, which is isolated itself; its pid. A fork that is
        isolated afterwards costs a millisecond of CPU more. All descriptors but 0 to 2 close."""
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
        """Start the program and isolate it after the fork, where otherwise it could reach this
        process; its pid."""
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
            isolation.die_with_parent(signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            for signum in _DEFAULT:
                signal.signal(signum, signal.SIG_DFL)
            os.nice(self._nice)
            os.chdir(order["cwd"])
            if self._ruleset is not None:
                isolation.landlock_restrict(self._ruleset)
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


def _is_dying(pid: int) -> bool:
    """Whether a program that has not ended for its pidfd is no more, but for some threads of it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] in b"ZX"
    return True


def _own_limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in range(_RESOURCES)]


def _cpu_rlimit(cpu_s: float, hard: int) -> int:
    soft = math.ceil(min(cpu_s, 1e9)) + _CPU_SPARE_S
    return soft if hard == resource.RLIM_INFINITY else min(soft, hard)


def tell(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())
