"""The zygote: a process that has imported a header, and is forked into supervisors of its own kind.

It takes the place of the inner process of :mod:`leanq.lean.sandbox.supervisor`, in the same
namespaces, and runs no text but the header::

    worker ── socket ──┐
      └─ outer         │
           └─ zygote ◄─┘   has imported the header
                ├─ inner   forked from it, in namespaces of its own, for one slot of the worker
                │    └─ a fork of inner, in which Lean goes on behind the header
                └─ inner   …

So each slot has its usual walls, limits and messages. The worker sends the zygote one end of a
slot's socket, and gets a descriptor that tells when the slot's inner process has ended::

    worker → zygote  {"folders", "namespaces", "env", "program", "libraries", "arguments", "header"}
                     {"fork": true} with a socket, in which the first message to inner stands
    zygote → worker  {"ready": the exit code of the header's run, "memory_bytes": its own,
                      "unwatched": why nobody sees what texts evaluate, or ""}
                     {"forked": true} with a pidfd; or {"refused": text}

Without a process namespace it refuses, since a candidate could look into it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from leanq.lean.run.preloaded import Preloaded, PreloadError, own_arguments
from leanq.lean.sandbox import isolation, supervisor
from leanq.lean.sandbox.cgroup import children, own_memory_bytes, stat_fields
from leanq.lean.sandbox.monitor import MESSAGE_BYTES, tell
from leanq.lean.sandbox.supervisor import BY_MIDDLE, REFUSED, keep_programs, middle


def preload(
    channel: socket.socket,
    hello: dict[str, Any],
    namespaces: Sequence[str],
    fatal: Sequence[int],
) -> int:
    """Does the work of a zygote in the place of an inner process; returns its exit status."""
    if not {"pid", "mount"} <= set(namespaces):
        return REFUSED
    try:
        isolation.unshare([each for each in namespaces if each not in BY_MIDDLE])
        isolation.mount_proc()
    except OSError:
        return REFUSED
    # Standard input becomes Lean's.
    channel = socket.socket(fileno=os.dup(channel.detach()))
    os.chdir(hello["folders"][0])
    os.environ.clear()
    os.environ.update(hello["env"])

    def when_ready(code: int) -> NoReturn:
        ready = {"ready": code, "memory_bytes": own_memory_bytes()}
        tell(channel, {**ready, "unwatched": preloaded.unwatched})
        _Zygote(channel, preloaded, namespaces, fatal).serve()
        os._exit(0)

    try:
        header = hello["header"].encode()
        program, libraries, arguments = hello["program"], hello["libraries"], hello["arguments"]
        preloaded = Preloaded(program, libraries, arguments, header, when_ready)
        preloaded.run()
    except PreloadError as error:
        tell(channel, {"refused": str(error)})
    return 0


class _Zygote:
    """Forks inner processes, and reaps them."""

    def __init__(
        self,
        channel: socket.socket,
        preloaded: Preloaded,
        namespaces: Sequence[str],
        fatal: Sequence[int],
    ) -> None:
        self._channel = channel
        self._preloaded = preloaded
        self._namespaces = namespaces
        self._fatal = fatal
        self._inner: dict[int, int] = {}  # the pidfds of inner processes, by their pids

    def serve(self) -> None:
        """Obeys until the worker closes the socket, or one of the fatal pidfds reports."""
        self._poll = select.poll()
        for fd in (self._channel.fileno(), *self._fatal):
            self._poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            if not ready.isdisjoint(self._fatal):
                return
            for pid in [pid for pid, pidfd in self._inner.items() if pidfd in ready]:
                pidfd = self._inner.pop(pid)
                self._poll.unregister(pidfd)
                os.close(pidfd)
                os.waitpid(pid, 0)
            if self._channel.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Forks an inner process; returns False if the worker has gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except OSError:
            return False
        if not packet:
            return False
        try:
            pid = os.fork()
            if pid == 0:
                self._become_middle(fds[0])
        except OSError as error:
            tell(self._channel, {"refused": f"the zygote cannot fork: {error.strerror}"})
            return True
        finally:
            for fd in fds:
                os.close(fd)
        _, status = os.waitpid(pid, 0)
        [inner] = set(children()) - self._inner.keys() or [0]
        if not inner:
            tell(self._channel, {"refused": f"the zygote cannot isolate its forks ({status})"})
            return True
        pidfd = self._inner[inner] = os.pidfd_open(inner)
        self._poll.register(pidfd, select.POLLIN)
        socket.send_fds(self._channel, [json.dumps({"forked": True}).encode()], [pidfd])
        return True

    def _become_middle(self, fd: int) -> NoReturn:
        status = 1
        try:
            for pidfd in self._inner.values():
                os.close(pidfd)
            self._channel.close()
            inner = functools.partial(keep_programs, go_on=self._go_on)
            channel = socket.socket(fileno=fd)
            hello = json.loads(channel.recv(MESSAGE_BYTES))
            status = middle(inner, channel, hello, self._namespaces, self._fatal)
        finally:
            os._exit(status)

    def _go_on(self, argv: Sequence[str], reports: int, stays: bool) -> NoReturn:
        own = own_arguments(argv)
        if own[-1:] == [FLAG]:
            serve(self._preloaded, own[:-1])
        self._preloaded.go_on(own, reports, stays=stays)


def main() -> None:
    """The outer process, as :func:`leanq.lean.sandbox.supervisor.main`."""
    supervisor.main(preload)


# A program of the sandbox that stands behind a text's prefix, and forks for each continuation.
#
# It is forked from a zygote like every run, behind the same walls, and first has Lean elaborate a
# prefix. Then it is a server of its own: it elaborates each text that begins with the prefix in a
# fork. The prefix's author can make it say anything. So it serves texts with this one prefix, and
# its answers only decide where a search goes on.
#
# The forks share its walls, and nothing of one reaches the next. Their standard streams are files
# without a name. The process itself cannot be looked into: it is not dumpable, and forks have no
# privileges. A fork's left processes and files are removed before the next request.
#
# Over its standard input and output, numbers in network order::
#
#     worker → this   length of the prefix, the prefix                                        once
#                     length of the rest, CPU and wall seconds, what the text has behind the prefix
#     this → worker   status, why it was ended, lengths of both outputs, standard output and error
#
# The first answer is for the prefix. A status is an exit code, or a signal's number below 0.

FLAG = "--leanq-prefix"
"""The last argument of a zygote's program that becomes this one."""

PREFIX = struct.Struct("!Q")
REQUEST = struct.Struct("!Qdd")
ANSWER = struct.Struct("!iBQQ")
ENDS: tuple[Literal["cpu", "wall"] | None, ...] = (None, "cpu", "wall")
"""Why a fork was ended, by the number in the answer."""

_PR_SET_DUMPABLE = 4
_LEAST_LOOK_S, _MOST_LOOK_S = 0.025, 0.25
_REAPED_S = 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FILE_MODE = 0o600


def serve(preloaded: Preloaded, arguments: Sequence[str]) -> NoReturn:
    """Elaborates the prefix that the worker sends, and serves texts that begin with it, each with
    these arguments of Lean's."""
    # Standard streams belong to Lean from here on.
    requests, answers = os.dup(0), os.dup(1)
    [size] = PREFIX.unpack(_read(requests, PREFIX.size))
    prefix = _read(requests, size)
    streams = _Streams(prefix)

    def when_ready(code: int) -> NoReturn:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _write(answers, streams.answer(code, 0))
        streams.close()
        while code == 0:
            _serve_one(preloaded, arguments, prefix, requests, answers)
        os._exit(0)

    streams.become_standard()
    preloaded.stop_behind(arguments, size, when_ready)


def _serve_one(
    preloaded: Preloaded, arguments: Sequence[str], prefix: bytes, requests: int, answers: int
) -> None:
    """Forks for a request; ends this process once the worker has closed the pipe."""
    size, cpu_s, wall_s = REQUEST.unpack(_read(requests, REQUEST.size))
    streams = _Streams(prefix, _read(requests, size))
    before_s = _spent_s()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(requests)
        os.close(answers)
        streams.become_standard()
        streams.close()
        most = math.ceil(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        preloaded.go_on(arguments)
    status, end = _watch(pid, before_s + cpu_s, wall_s)
    # Before the answer: its time belongs to this request, and nothing writes to the streams.
    _tidy()
    answer = streams.answer(status, end)
    streams.close()
    _write(answers, answer)


class _Streams:
    """The input and outputs of one run, as files of the scratch folder without a name."""

    def __init__(self, *stdin: bytes) -> None:
        self._fds = [os.open(".", os.O_TMPFILE | os.O_RDWR, _FILE_MODE) for _ in range(3)]
        for piece in stdin:
            _write(self._fds[0], piece)
        os.lseek(self._fds[0], 0, os.SEEK_SET)

    def become_standard(self) -> None:
        for number, fd in enumerate(self._fds):
            os.dup2(fd, number)

    def answer(self, status: int, end: int) -> bytes:
        outputs = []
        for fd in self._fds[1:]:
            os.lseek(fd, 0, os.SEEK_SET)
            outputs.append(_read(fd, os.fstat(fd).st_size))
        return ANSWER.pack(status, end, *map(len, outputs)) + b"".join(outputs)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _watch(pid: int, cpu_end_s: float, wall_s: float) -> tuple[int, int]:
    """Waits for a fork's end, or ends it; returns its status, and the number of the end."""
    end, wall_end_s = 0, time.monotonic() + wall_s
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    pause_s = _LEAST_LOOK_S
    while not poll.poll(1e3 * min(pause_s, max(0.0, wall_end_s - time.monotonic()))):
        left_s = cpu_end_s - _spent_s()
        if left_s < 0 or time.monotonic() >= wall_end_s:
            end = ENDS.index("cpu" if left_s < 0 else "wall")
            os.kill(pid, signal.SIGKILL)
            break
        pause_s = min(max(left_s, _LEAST_LOOK_S), _MOST_LOOK_S)
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    if not end and _spent_s() > cpu_end_s:
        end = ENDS.index("cpu")
    return os.waitstatus_to_exitcode(status), end


def _tidy() -> None:
    """Ends a fork's remaining processes here, and removes its files; or ends this process, as the
    next fork would find what lies in a folder that cannot be listed, or too deep."""
    with contextlib.suppress(ProcessLookupError):
        while True:  # until the first process of the namespace has reaped them
            os.kill(-1, signal.SIGKILL)
            time.sleep(_REAPED_S)
    try:
        for folder, folders, files in os.walk(".", topdown=False, onerror=_raise):
            for name in files:
                os.unlink(f"{folder}/{name}")
            for name in folders:
                path = f"{folder}/{name}"
                (os.unlink if os.path.islink(path) else os.rmdir)(path)
    except (OSError, RecursionError):
        os._exit(1)


def _raise(error: OSError) -> NoReturn:
    raise error


def _spent_s() -> float:
    """Returns the CPU time of everything in this namespace, past processes included."""
    ticks = 0
    for name in os.listdir("/proc"):
        # It may have ended meanwhile, and then counts as its parent's child.
        with contextlib.suppress(OSError):
            if name.isdigit():
                ticks += sum(map(int, stat_fields(name)[11:15]))
    return ticks / _TICKS_PER_S


def _read(fd: int, size: int) -> bytes:
    """Returns exactly so many bytes; ends the process if the worker has gone."""
    chunks = []
    while size:
        chunk = os.read(fd, size)
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
