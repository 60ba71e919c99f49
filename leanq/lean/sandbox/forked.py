"""What a fork of a process does to be a program: its descriptors, signals and variables."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

_DESCRIPTORS = (1 << 31) - 1
DEFAULT = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
"""For programs. SIGTERM stays ignored: Slurm sends it to every process of a job, and what runs may
end within the worker's grace."""


def keep_only(fds: Sequence[int], report: int, tells: int) -> None:
    """Makes these the standard streams, and closes all other descriptors, also those of Lean.

    The one that ``tells`` stays, and one pipe. libuv makes it in each fork, and the next fork
    closes its two numbers, even if a program that Lean has started holds them by then. No other
    pipe has both its ends here.
    """
    others = {os.fstat(fd).st_ino for fd in (*fds, report)}
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    pipes = defaultdict[int, list[int]](list)
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # the list's own one
            found = os.fstat(fd)
            if stat.S_ISFIFO(found.st_mode) and found.st_ino not in others:
                pipes[found.st_ino].append(fd)
    begin = len(fds)
    pipe = chain.from_iterable(both for both in pipes.values() if len(both) == 2)
    for fd in sorted([*pipe, tells]):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, _DESCRIPTORS)


def be_program(env: dict[str, str]) -> None:
    """Makes this process what a program finds itself as when it is started here."""
    os.setsid()
    for signum in DEFAULT:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Most are the same already, and each that is set costs a page.
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
