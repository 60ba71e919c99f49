"""What the tests of the sandbox share: programs in Python, and a look at the whole machine."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox

MB = 1 << 20
MODES = ("namespaces", "fallback")
GENEROUS = Limits(cpu_s=30, wall_s=60, memory_bytes=1 << 30)
PYTHON = [Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable))]

# A daemon that leaves its family, session and process group, and then runs {body}.
DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(1, b"ready")
            {body}
        os._exit(0)
    os.wait()
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *arguments]


async def run(
    sandbox: Sandbox, code: str, *arguments: str, limits: Limits = GENEROUS, stdin: bytes = b""
) -> Finished:
    argv = python(code, *arguments)
    return await sandbox.run(argv, env={}, limits=limits, stdin=stdin)


async def output(sandbox: Sandbox, code: str, *arguments: str) -> str:
    finished = await run(sandbox, code, *arguments)
    assert finished.exit.code == 0, finished
    return finished.stdout.decode().strip()


def marked(marker: str) -> list[int]:
    """The processes of the whole machine, of inner namespaces too, with ``marker`` in argv."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def busy(marker: str, least_s: float = 0.3) -> list[int]:
    """Those of them that have spent CPU time on more than their start."""
    found = []
    for pid in marked(marker):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            if sum(map(int, fields[11:13])) > 100 * least_s:
                found.append(pid)
    return found


def new_marker() -> str:
    """An argument by which ``marked`` finds a process."""
    return uuid.uuid4().hex


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    """Whether there is such a process and it is more than a zombie of someone else's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def needs(sandbox: Sandbox, *kinds: str, landlock: int | None = None) -> None:
    """Skip unless one of these kinds of isolation is here, or Landlock of at least that ABI."""
    have = sandbox.isolation
    abi = next((int(kind[9:]) for kind in have if kind.startswith("landlock-")), 0)
    if not set(kinds) & set(have) and (landlock is None or abi < landlock):
        pytest.skip(f"too little isolation on this machine: {have}")


@contextlib.asynccontextmanager
async def opened(mode: str, *readable: Path) -> AsyncIterator[Sandbox]:
    """A sandbox of one of the ``MODES``. Nothing of it may be left afterwards."""
    sandbox = await Sandbox.open(readable=[*PYTHON, *readable], namespaces=mode == "namespaces")
    supervisor, folder = sandbox.supervisor.pid, sandbox.left
    try:
        if mode == "namespaces":
            needs(sandbox, "mount-ns")
        yield sandbox
    finally:
        await sandbox.close()
        assert not sandbox.alive
        assert not folder.exists()
        assert not Path(f"/proc/{supervisor}").exists()
