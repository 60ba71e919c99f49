"""A program of the sandbox that stands behind a prefix of a text, and forks for each way to go on.

It is forked from a zygote like every run, behind the same walls, and has Lean elaborate a prefix
first. Then it is a server of its own: each text that begins with the prefix is elaborated in a fork
that goes on from there. So the prefix's author can make it say anything: it serves texts with this
one prefix, and what it says decides nothing but where a search goes on.

The forks share its walls. Nothing of one reaches the next: their standard streams are files without
a name, the process itself cannot be looked into (it is not dumpable, and they have no privileges),
and whatever a fork leaves, processes and files, is ended and removed before the next request.

Over its standard input and output, numbers in network order::

    worker → this   length of the prefix, the prefix                                        once
                    length of the rest, CPU and wall seconds, what the text has behind the prefix
    this → worker   status, why it was ended, lengths of both outputs, standard output and error

The first answer is for the prefix. A status is an exit code, or a signal's number below 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import struct
import time
from typing import Literal, NoReturn

from leanq.lean.fork_server.preloaded import Preloaded

FLAG = "--leanq-prefix"
"""What a zygote's program is started with, as its last argument, to be this."""

PREFIX = struct.Struct("!Q")
REQUEST = struct.Struct("!Qdd")
ANSWER = struct.Struct("!iBQQ")
ENDS: tuple[Literal["cpu", "wall"] | None, ...] = (None, "cpu", "wall")
"""Why a fork was ended, by the number of the answer."""

_PR_SET_DUMPABLE = 4
_LEAST_LOOK_S, _MOST_LOOK_S = 0.025, 0.25
_REAPED_S = 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FILE_MODE = 0o600


def serve(preloaded: Preloaded) -> NoReturn:
    """Elaborates the prefix that the worker sends, and serves texts that begin with it."""
    # Standard streams are Lean's from here on.
    requests, answers = os.dup(0), os.dup(1)
    [size] = PREFIX.unpack(_read(requests, PREFIX.size))
    prefix = _read(requests, size)
    streams = _Streams(prefix)

    def when_ready(code: int) -> NoReturn:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _write(answers, streams.answer(code, 0))
        streams.close()
        if code == 0:
            _PrefixServer(preloaded, prefix, requests, answers).serve()
        os._exit(0)

    streams.become_standard()
    preloaded.stop_behind(size, when_ready)


class _PrefixServer:
    """Forks for each request, one after the other."""

    def __init__(self, preloaded: Preloaded, prefix: bytes, requests: int, answers: int) -> None:
        self._preloaded = preloaded
        self._prefix = prefix
        self._requests = requests
        self._answers = answers

    def serve(self) -> None:
        """Until the worker closes the pipe."""
        while True:
            size, cpu_s, wall_s = REQUEST.unpack(_read(self._requests, REQUEST.size))
            streams = _Streams(self._prefix, _read(self._requests, size))
            before_s = _spent_s()
            pid = os.fork()
            if pid == 0:
                self._go_on(streams, cpu_s)
            status, end = _watch(pid, before_s + cpu_s, wall_s)
            # Before the answer: its time is this request's, and nothing writes to the streams.
            _tidy()
            answer = streams.answer(status, end)
            streams.close()
            _write(self._answers, answer)

    def _go_on(self, streams: _Streams, cpu_s: float) -> NoReturn:
        os.setsid()
        os.close(self._requests)
        os.close(self._answers)
        streams.become_standard()
        streams.close()
        most = math.ceil(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        self._preloaded.go_on()


class _Streams:
    """What one run reads and writes, as files of the scratch folder that have no name."""

    def __init__(self, *stdin: bytes) -> None:
        self._fds = [os.open(".", os.O_TMPFILE | os.O_RDWR, _FILE_MODE) for _ in range(3)]
        for piece in stdin:
            _write(self._fds[0], piece)
        os.lseek(self._fds[0], 0, os.SEEK_SET)

    def become_standard(self) -> None:
        for number, fd in enumerate(self._fds):
            os.dup2(fd, number)

    def answer(self, status: int, end: int) -> bytes:
        """The answer with what the run has written."""
        outputs = []
        for fd in self._fds[1:]:
            os.lseek(fd, 0, os.SEEK_SET)
            outputs.append(_read(fd, os.fstat(fd).st_size))
        return ANSWER.pack(status, end, *map(len, outputs)) + b"".join(outputs)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _watch(pid: int, cpu_end_s: float, wall_s: float) -> tuple[int, int]:
    """Waits for a fork's end, or brings it about; its status, and why it was ended.

    ``cpu_end_s`` is what may have been spent in this namespace by then, since that began.
    """
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
    """Ends what a fork has left in this namespace, and removes its files.

    This process ends where it cannot: modes cannot be changed here, and what stands in a folder
    that cannot be listed, or too deep, would be there for the next fork.
    """
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
    """The CPU time of everything in this namespace, with that of what has ended: a fork's children
    have no limit of their own. The first process of the namespace reaps what has no parent."""
    ticks = 0
    for name in os.listdir("/proc"):
        # It may have ended meanwhile, and then counts as a child of its parent's.
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    ticks += sum(map(int, file.read().rpartition(b") ")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


def _read(fd: int, size: int) -> bytes:
    """Exactly so many bytes; the process ends where the worker has gone."""
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
