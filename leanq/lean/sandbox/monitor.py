"""The inner supervisor: keeps one program at a time within its limits.

See :mod:`leanq.lean.sandbox.supervisor` for the messages.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from leanq.lean.sandbox import isolation
from leanq.lean.sandbox.cgroup import (
    Cgroup,
    UsageSampler,
    descendants,
    own_memory_bytes,
    stat_fields,
)
from leanq.lean.sandbox.first_process import DEFAULT, FirstProcess, be_program, keep_only
from leanq.lean.sandbox.scratch import Scratch, empty
from leanq.lean.sandbox.walls import Walls

MESSAGE_BYTES = 1 << 18  # above a socket buffer's default, so nothing is cut

# The time between two samples. One thread cannot break a limit sooner, by CPU time or by the
# quickest growth of memory; each sample costs the machine some 0.3 ms.
_CLOSE_LOOK_S = 0.025
_GROWTH_BYTES_PER_S = 4 << 30
_CPU_SPARE_S = 5  # RLIMIT_CPU is the second line, for a supervisor that cannot run
_RESOURCES = 16  # the limits that Linux knows
_PROCESS_CLOCK = 2  # of a clock's number: the CPU time of a process, as precise as can be
_STATUS = struct.Struct("=i")
_HELD = b"held"
_MOST_REPORTS, _REPORT_BYTES = 8, 1024
ENDED, WAITS = b"x", b"w"
"""How a fork tells that its text has ended, with its exit status, and that it can go on."""
_ENDED = re.compile(ENDED + rb"(\d{1,3})")
# A fork serves so many texts, and none once it holds so much more than when it began.
_MOST_TEXTS, _MOST_KEPT_BYTES = 8, 64 << 20
# The time for a fork whose text has ended to be ready for another one.
_READY_S = 0.25
_RESERVED_FDS = 64  # above those of a program, which came last
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the worker decides
_NICEST = 19


def _reap(statuses: dict[int, int], options: int = os.WNOHANG) -> bool:
    """Notes the wait status of each ended child; returns False if there is no child at all."""
    try:
        while True:
            pid, status = os.waitpid(-1, options)
            if pid == 0:
                return True
            statuses[pid] = status
    except ChildProcessError:
        return False


def end_all(statuses: dict[int, int]) -> None:
    """Kills and reaps every process below this one."""
    while _reap(statuses):
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            _reap(statuses, 0)
            return
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


GoOn = Callable[[Sequence[str], int, bool], NoReturn]


class Monitor:
    """The inner process: obeys the worker and keeps one program within its limits.

    A fork may go on with a further text of the same tenant, which the worker sends as ``further``.
    It does so if it reported nothing, so that no program of a text ran in it, and if one thread of
    it is left. Each text's CPU time, wall time and scratch folder count from its beginning. Memory
    counts from the fork's, so that what earlier texts have left counts, too.
    """

    def __init__(
        self,
        channel: socket.socket,
        walls: Walls,
        scratch: Scratch,
        group: Cgroup,
        nice: int,
        go_on: GoOn | None = None,
    ) -> None:
        """``go_on`` turns a fork of this process into the program, with the program's arguments, a
        socket for its reports, and whether further texts may come by that, instead of an exec. It
        needs pid namespaces."""
        self._channel = channel
        self._go_on = go_on
        # Memory that a fork shares with this process is not the program's.
        self._shared_bytes = own_memory_bytes() if go_on else 0
        self._walls = walls
        self._scratch = scratch
        self._group = group
        self._nice = nice
        self._statuses: dict[int, int] = {}
        self._pid = os.getpid()
        self._own_state = _own_state()
        self._program = 0  # pid of the program or its holder; 0 while nothing runs
        self._told: socket.socket | None = None  # our end of a fork's socket for its reports
        self._heard: list[str] = []
        self._stays = False  # whether the fork may go on behind its text
        self._code: int | None = None  # how a fork's text has ended, which may go on
        self._waits = False  # for a further text
        self._texts = 0  # how many the fork has had
        # A fork needs no holder: it gets a first process beside it.
        self._first = FirstProcess() if go_on else None
        self._has_holder = walls.own_pids and not go_on

    def serve(self, fatal: Iterable[int]) -> None:
        """Obeys until the worker closes the socket, or one of the ``fatal`` pidfds reports."""
        self._poll = select.poll()
        for fd in (self._channel.fileno(), *fatal):
            self._poll.register(fd, select.POLLIN)
        while True:
            timeout_ms = None
            if self._code is not None:
                timeout_ms = max(0.0, self._ready_by - time.monotonic()) * 1e3
            elif self._program and self._limited:
                timeout_ms = max(0.0, min(self._look_at, self._wall_end) - time.monotonic()) * 1e3
            ready = {fd for fd, _ in self._poll.poll(timeout_ms)}
            if not ready.isdisjoint(fatal):
                return
            if self._told is not None and self._told.fileno() in ready:
                self._hear(self._told)
            # Its end comes before any order: limits must not seem to have reached the dead.
            is_late = self._code is not None and time.monotonic() >= self._ready_by
            if self._program and (self._pidfd in ready or is_late):
                self._finish(None)
            if self._channel.fileno() in ready and not self._obey():
                return
            if self._program and self._limited and self._code is None:
                self._look()

    def _obey(self) -> bool:
        """Carries out one order; returns False if the worker has gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 3)
        except OSError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        order = json.loads(packet) if packet else {}
        runs = self._program and not self._waits
        if "start" in order:
            self._dismiss()
            self._start(order["start"], fds)
        elif "further" in order:
            self._go_further(order["further"])
        # The program may have ended while these were under way.
        elif "limit" in order and runs and not self._is_dying():
            self._stays = order["stays"]
            self._usage.sample()
            self._renew(order["limit"], held_bytes=self._shared_bytes)
        elif "renew" in order and runs:
            self._usage.sample()
            held_bytes = self._usage.memory_bytes
            self._group.renew()
            cpu_s = self._renew(order["renew"], held_bytes=held_bytes)
            if order["is_told"]:
                own_bytes = max(held_bytes - self._shared_bytes, 0)
                tell(self._channel, {"renewed": {"cpu_s": cpu_s, "memory_bytes": own_bytes}})
        elif "stop" in order and runs:
            self._finish(order["stop"])
        return bool(packet)

    def _start(self, order: dict[str, Any], fds: list[int]) -> None:
        self._statuses.clear()
        limits = order["limits"]
        try:
            # A program that waits for its input could write before its limits have come.
            self._scratch.open(limits["scratch_bytes"] if limits else math.inf)
            self._group.begin()
            first, self._program, self._report = self._fork(order, fds)
        except (OSError, ValueError) as error:
            end_all(self._statuses)
            self._scratch.close()
            tell(self._channel, {"refused": _cannot_start(order["argv"][0], error)})
            return
        finally:
            for fd in fds:
                os.close(fd)
        if self._has_holder:
            first = self._program
        self._first_pid = first
        self._usage = self._new_usage()
        self._pidfd = os.pidfd_open(self._program)
        self._poll.register(self._pidfd, select.POLLIN)
        if self._told is not None and order["stays"]:
            self._poll.register(self._told.fileno(), select.POLLIN)
        self._started = time.monotonic()
        self._cpu_base_s = self._begun_s = 0.0
        self._limited = False
        self._stays, self._texts, self._code, self._heard = order["stays"], 1, None, []
        if limits:
            self._limit(limits, held_bytes=self._shared_bytes)
        if order["report"]:
            tell(self._channel, {"started": True}, self._scratch.fds)

    def _new_usage(self) -> UsageSampler:
        return UsageSampler(first=self._first_pid, shared=not self._walls.filtered)

    def _go_further(self, order: dict[str, Any]) -> None:
        """Has a fork that waits go on with another text."""
        if self._waits:
            try:
                empty(self._scratch.path)
            except OSError:
                self._dismiss()
        if not self._waits or self._told is None:
            tell(self._channel, {"refused": "the process that was to go on has ended"})
            return
        self._waits = False
        self._texts += 1
        self._usage, self._group.peak_bytes = self._new_usage(), 0
        self._usage.cpu_s = self._begun_s = self._own_s()
        text = [order["argv"], order["text"]]
        self._renew(order["limits"], held_bytes=self._shared_bytes)
        with contextlib.suppress(OSError):  # its end is seen
            self._told.send(json.dumps(text).encode())

    def _hear(self, told: socket.socket) -> None:
        """Takes a message of a fork that may go on. Behind a report nothing counts but its end."""
        packet = b""
        with contextlib.suppress(ConnectionError):
            packet = told.recv(_REPORT_BYTES)
        if packet == WAITS and self._code is not None and not self._heard:
            self._keep()
        elif (ended := _ENDED.fullmatch(packet)) and self._code is None and not self._heard:
            self._code = int(ended[1]) & 0xFF
            self._ready_by = time.monotonic() + _READY_S
            if not self._stays or self._texts >= _MOST_TEXTS:
                self._finish(None)
        else:
            self._poll.unregister(told.fileno())
            if packet:
                self._heard.append(packet.decode(errors="replace"))

    def _keep(self) -> None:
        """Reports on a text, and keeps its fork for another one, unless it has used too much."""
        self._usage.sample()
        self._usage.cpu_s = self._own_s()
        held_bytes = self._usage.memory_bytes - self._shared_bytes
        written_bytes = self._disk_bytes()
        if (
            # The first process of its namespace, and one thread.
            self._usage.tasks != 2
            or held_bytes > _MOST_KEPT_BYTES
            or self._usage.cpu_s > self._cpu_end_s
            or written_bytes > self._scratch_bytes
            or not self._limited
        ):
            self._finish(None)
            return
        assert self._code is not None
        status, self._code = self._code, None
        self._waits, self._limited = True, False
        self._report_exit(status, None, 0.0, written_bytes, limited=True)

    def _own_s(self) -> float:
        """Returns the CPU time of the program's own process until now."""
        return time.clock_gettime(~self._program << 3 | _PROCESS_CLOCK)

    def _dismiss(self) -> None:
        """Ends a fork that waits for another text."""
        if self._waits:
            self._end_program()
            self._reports()
            self._scratch.close()

    def _end_program(self) -> int:
        """Ends all that is left of the program; returns the wait status of its main process."""
        end_all(self._statuses)
        self._poll.unregister(self._pidfd)
        os.close(self._pidfd)
        if self._told is not None:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._told.fileno())
        with open(self._report, "rb") as report:
            told = report.read()
        program, self._program, self._waits = self._program, 0, False
        if not self._has_holder:
            return self._statuses[program]
        return _STATUS.unpack(told)[0] if told else int(signal.SIGKILL)

    def _limit(self, limits: dict[str, Any], *, held_bytes: int) -> None:
        self._limited = True
        self._started = time.monotonic()
        self._cpu_end_s: float = self._cpu_base_s + limits["cpu_s"]
        self._wall_end: float = self._started + limits["wall_s"]
        self._memory_bytes: int = held_bytes + limits["memory_bytes"]
        self._look_s: float = limits["look_s"]
        self._scratch_bytes: float = limits["scratch_bytes"]
        self._group.limit(limits["memory_bytes"], self._scratch_bytes)
        self._over = False
        self._look_at = self._started + self._pause_s()

    def _pause_s(self) -> float:
        cpu_s = self._cpu_end_s - self._usage.cpu_s
        memory_s = (self._memory_bytes - self._usage.memory_bytes) / _GROWTH_BYTES_PER_S
        return max(min(cpu_s, memory_s, self._look_s), _CLOSE_LOOK_S)

    def _renew(self, limits: dict[str, Any], *, held_bytes: int) -> float:
        """Counts afresh, against new limits; returns the CPU seconds spent until now. Memory that
        it holds already does not count against its limit. Call it after a sample."""
        spent_s = self._usage.cpu_s - self._cpu_base_s
        self._cpu_base_s = self._usage.cpu_s
        self._limit(limits, held_bytes=held_bytes)
        self._scratch.resize(self._scratch_bytes)
        for pid in self._mains():
            with contextlib.suppress(ProcessLookupError):
                _limit_cpu(pid, self._cpu_end_s)
        return spent_s

    def _look(self) -> None:
        """Takes a sample if it is time, and ends the program if it breaks a limit."""
        now = time.monotonic()
        if now >= self._wall_end:
            self._finish("wall")
            return
        if now < self._look_at:
            return
        _reap(self._statuses)
        self._usage.sample()
        over = self._usage.memory_bytes > self._memory_bytes or self._group.is_over()
        if self._usage.cpu_s > self._cpu_end_s:
            self._finish("cpu")
        elif over and self._over:
            self._finish("memory")
        elif self._usage.tasks > self._walls.most_tasks:
            self._finish("processes")
        elif self._disk_bytes() > self._scratch_bytes:
            self._finish("scratch")
        # Between fork and exec a child seems to have its parent's memory: look twice.
        self._over = over
        self._look_at = now + self._pause_s()

    def _disk_bytes(self) -> float:
        if math.isinf(self._scratch_bytes):
            return 0.0
        return self._scratch.used_bytes(self._scratch_bytes)

    def _finish(self, stopped: str | None) -> None:
        """Ends the rest of the program and reports. Its status is what a fork has told at its
        text's end, or else the main process's."""
        if stopped and self._limited:
            self._usage.sample()
        if self._waits:  # there is no text to report on
            self._dismiss()
            return
        waited_s = self._usage.waited_s() if stopped == "wall" else 0.0
        ended, status = self._end_program(), self._code
        if status is None:
            status = os.waitstatus_to_exitcode(ended)
        self._code = None
        # Without a filter, any process of this user can do that. The request whose program did it
        # has to fail, not the next one.
        if _own_state() != self._own_state:
            raise OSError("the program has changed the limits or the scheduling of its supervisor")
        self._usage.conclude()
        if stopped is None and self._limited and self._usage.cpu_s > self._cpu_end_s:
            stopped = "cpu"  # or it would depend on the time of the last sample
        if stopped is None and self._limited and self._group.has_killed():
            stopped = "memory"
        written_bytes = self._disk_bytes() if self._limited else 0.0
        if stopped is None and self._limited and written_bytes > self._scratch_bytes:
            stopped = "scratch"
        if stopped is None and status and self._scratch.on_full_disk():
            path = self._scratch.path
            text = f"the disk of {path} is full: free some of it, or set TMPDIR to another"
            tell(self._channel, {"refused": text})
            return
        self._report_exit(status, stopped, waited_s, written_bytes, limited=self._limited)
        self._scratch.close()

    def _report_exit(
        self,
        status: int,
        stopped: str | None,
        waited_s: float,
        written_bytes: float,
        *,
        limited: bool,
    ) -> None:
        peak_bytes = self._usage.peak_bytes - self._shared_bytes
        report = {
            "status": status,
            "stopped": stopped,
            "cpu_s": self._usage.cpu_s - self._begun_s,
            "wall_s": time.monotonic() - self._started,
            "peak_bytes": max(peak_bytes, self._group.peak_bytes, 0),
            "scratch_bytes": int(min(written_bytes, 1 << 62)),
            "waited_s": waited_s,
            "reports": [] if self._waits else self._reports(),
            "earlier": self._texts - 1,
        }
        message = {"exit": report, "limited": limited, "waits": self._waits}
        tell(self._channel, message, self._scratch.fds)

    def _reports(self) -> list[str]:
        """Returns what a fork has told. It has ended, so nothing comes any more."""
        if self._told is None:
            return []
        reports, self._heard = self._heard, []
        self._told.setblocking(False)
        with self._told as told, contextlib.suppress(OSError):
            while len(reports) < _MOST_REPORTS and (packet := told.recv(_REPORT_BYTES)):
                if packet != WAITS and not _ENDED.fullmatch(packet):
                    reports.append(packet.decode(errors="replace"))
        self._told = None
        return reports

    def _mains(self) -> Iterator[int]:
        if not self._has_holder:
            yield self._program
            return
        for pid in descendants():
            if pid != self._program and _stat(pid)[1:2] == [b"%d" % self._program]:
                yield pid

    def _is_dying(self) -> bool:
        """Returns whether only threads are left of a program whose pidfd reports no end."""
        return all(_stat(pid)[:1] in ([], [b"Z"], [b"X"]) for pid in self._mains())

    def _fork(self, order: dict[str, Any], fds: list[int]) -> tuple[int, int, int]:
        """Starts the program behind its walls; returns the pid of a first process beside it or 0,
        its own pid or its holder's, and its channel for reports."""
        reports, report = os.pipe2(os.O_CLOEXEC)
        told = tells = None
        try:
            if self._go_on is not None:
                told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            first, pid = self._walls.fork(self._first)
            if pid == 0:
                self._become(order, fds, report, tells)
        except OSError:
            os.close(reports)
            if told is not None:
                told.close()
            raise
        finally:
            os.close(report)
            if tells is not None:
                tells.close()
        if self._told is not None:  # of one that could not begin
            self._told.close()
        self._told = told
        # It ends when the program has taken over, or when the holder says that it has started it.
        text = os.read(reports, len(_HELD))
        if text not in (b"", _HELD):
            with open(reports, "rb") as file:
                raise OSError(*json.loads(text + file.read()))
        return first, pid, reports

    def _become(
        self, order: dict[str, Any], fds: list[int], report: int, tells: socket.socket | None
    ) -> NoReturn:
        """Turns this fork into the program, or its holder. All descriptors but 0 to 2 close, and
        the one for a fork's reports."""
        argv = order["argv"]
        try:
            os.nice(self._nice)
            if self._nice == _NICEST:
                # A niceness of 19 alone gets a share of a CPU that others want.
                with contextlib.suppress(OSError):  # not every kernel has it
                    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            if order["limits"]:
                _limit_cpu(0, order["limits"]["cpu_s"])
            self._group.enter()
            if self._go_on is not None and tells is not None:
                self._walls.enter()
                os.chdir(self._scratch.path)
                keep_only(fds, report, tells.fileno())
                be_program(order["env"])
                self._go_on(argv, tells.fileno(), order["stays"])
            if self._walls.own_pids:
                self._walls.enter()
                os.chdir(self._scratch.path)
                self._hold(argv, order["env"], fds, report)
            os.setsid()
            isolation.die_with_parent(signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            for signum in DEFAULT:
                signal.signal(signum, signal.SIG_DFL)
            self._walls.enter()
            os.chdir(self._scratch.path)
            os.execve(argv[0], argv, order["env"])
        except OSError as error:
            os.write(report, json.dumps([error.errno, error.strerror, error.filename]).encode())
        except Exception as error:
            os.write(report, json.dumps([0, str(error)]).encode())
        os._exit(127)

    def _hold(self, argv: list[str], env: dict[str, str], fds: list[int], report: int) -> NoReturn:
        """Starts the program and waits for its end, as the first process of its namespace."""
        program = os.posix_spawn(
            argv[0],
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
            setsid=True,
            setsigdef=DEFAULT,
        )
        os.write(report, _HELD)
        os.closerange(0, report)
        os.closerange(report + 1, max(fds) + _RESERVED_FDS)
        pid = status = 0
        while pid != program:
            pid, status = os.wait()
        os.write(report, _STATUS.pack(status))
        os._exit(0)


def _cannot_start(program: str, error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return f"cannot start {program}: {error}"
    where = f" ({error.filename})" if error.filename not in (None, program) else ""
    return f"cannot start {program}: {error.strerror}{where}"


def _stat(pid: int) -> list[bytes]:
    """Returns the fields of /proc/PID/stat from the state on; empty once it is gone."""
    with contextlib.suppress(OSError):
        return stat_fields(pid)
    return []


def _own_state() -> list[object]:
    """Returns what a program could change of its supervisor, and of later programs with it."""
    limits: list[object] = [resource.getrlimit(limit) for limit in range(_RESOURCES)]
    scheduling = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    return [*limits, *scheduling, os.sched_getaffinity(0)]


def _limit_cpu(pid: int, cpu_s: float) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
    soft = math.ceil(min(cpu_s, 1e9)) + _CPU_SPARE_S
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.prlimit(pid, resource.RLIMIT_CPU, (soft, hard))


def tell(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    socket.send_fds(channel, [json.dumps(message).encode()], fds)
