"""A zygote whose forks run Python that they read from standard input, in Lean's place.

Lean cannot make every system call; what stands around a fork is tried by programs that can. All but
``Preloaded`` is leanq's own code: the zygote, its inner processes, the walls and the monitor.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from socket import socket

from leanq.lean.fork_server import server
from leanq.lean.fork_server.server import Zygote
from leanq.lean.sandbox.sandbox import PACKAGE, Sandbox, Supervisor
from support.sandboxes import PYTHON, children

_STANDIN = Path(__file__).with_name("preloaded_standin.py")
_BOOT = """
import sys, types
leanq = sys.modules["leanq"] = types.ModuleType("leanq")
leanq.__path__ = [sys.argv[1]]
from leanq.lean.fork_server import zygote
names = {}
exec(open(sys.argv[2]).read(), names)
zygote.Preloaded = names["Preloaded"]
zygote.main()
"""


def spawn(channel: socket, _module: str) -> Supervisor:
    """In the place of :func:`leanq.lean.sandbox.sandbox.spawn`."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, str(PACKAGE), str(_STANDIN)],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    return Supervisor(os.pidfd_open(process.pid), process)


@contextlib.asynccontextmanager
async def python_zygote() -> AsyncIterator[Zygote]:
    """A zygote of Python; nothing of it may be left afterwards."""
    before = set(children(os.getpid()))
    lean_spawn, server.spawn = server.spawn, spawn
    try:
        zygote = await Zygote.open([], [], "", {})
    finally:
        server.spawn = lean_spawn
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
    [pid] = children(zygote.pid)
    return pid


def family(zygote: Zygote) -> list[int]:
    """Every process that descends from its supervisor, and that."""
    found = [zygote.pid]
    for pid in found:  # which grows meanwhile
        with contextlib.suppress(OSError):
            found += children(pid)
    return found


def private_bytes(pid: int) -> int:
    """The memory that a process shares with no file."""
    with open(f"/proc/{pid}/status") as file:
        [line] = [line for line in file if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10
