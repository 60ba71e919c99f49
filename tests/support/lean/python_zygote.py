"""A zygote whose forks run Python that they read from standard input, in Lean's place.

Lean cannot make every system call; what stands around a fork is tried by programs that can. All but
``Preloaded`` is leanq's own code: the zygote, its inner processes, the walls and the monitor.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from socket import socket

from leanq.lean.run import zygote_client
from leanq.lean.run.zygote_client import Zygote
from leanq.lean.sandbox.sandbox import PACKAGE, Sandbox, Supervisor
from support.lean.sandboxes import PYTHON, children

_STANDIN = Path(__file__).with_name("preloaded_standin.py")
_BOOT = """
import os, sys, types
leanq = sys.modules["leanq"] = types.ModuleType("leanq")
leanq.__path__ = [sys.argv[1]]
from leanq.lean.run import zygote
names = {}
forks = int(sys.argv[3])
def scarce(fork=os.fork):
    # Fails once, after so many.
    global forks
    forks -= 1
    if forks == 0:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = scarce
exec(open(sys.argv[2]).read(), names)
zygote.Preloaded, zygote.own_arguments = names["Preloaded"], names["own_arguments"]
zygote.main()
"""


# The supervisor's forks come first: one that goes into namespaces, and the zygote.
FIRST_FORK = 3


def spawn(channel: socket, _module: str, *, scarce_at: int = 0) -> Supervisor:
    """In the place of :func:`leanq.lean.sandbox.sandbox.spawn`."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, str(PACKAGE), str(_STANDIN), str(scarce_at)],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    return Supervisor(os.pidfd_open(process.pid), process)


@contextlib.contextmanager
def python_in_place_of_lean(*, scarce_at: int = 0) -> Iterator[None]:
    """Zygotes that are opened meanwhile are of Python."""
    lean_spawn, zygote_client.spawn = zygote_client.spawn, partial(spawn, scarce_at=scarce_at)
    try:
        yield
    finally:
        zygote_client.spawn = lean_spawn


@contextlib.asynccontextmanager
async def python_zygote(*, scarce_at: int = 0) -> AsyncIterator[Zygote]:
    """A zygote of Python; nothing of it may be left afterwards. ``scarce_at``: the number of the
    one fork, from ``FIRST_FORK`` on, for which the machine has no process left."""
    before = set(children(os.getpid()))
    with python_in_place_of_lean(scarce_at=scarce_at):
        zygote = await Zygote.open(None, [], [], "", {})
    try:
        yield zygote
    finally:
        await zygote.close()
        assert set(children(os.getpid())) <= before


@contextlib.asynccontextmanager
async def forked(zygote: Zygote) -> AsyncIterator[Sandbox]:
    """A sandbox whose programs are forks of it."""
    sandbox = await Sandbox.open(readable=PYTHON, start=zygote.fork)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def own_pid(zygote: Zygote) -> int:
    """The process that has imported, as this process sees it."""
    [pid] = children(zygote.supervisor.pid)
    return pid


def family(zygote: Zygote) -> list[int]:
    """Every process that descends from its supervisor, and that."""
    found = [zygote.supervisor.pid]
    for pid in found:  # which grows meanwhile
        with contextlib.suppress(OSError):
            found += children(pid)
    return found


def private_bytes(pid: int) -> int:
    """The memory that a process shares with no file."""
    with open(f"/proc/{pid}/status") as file:
        [line] = [line for line in file if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10
