"""The sandbox where something lies over /proc, as in containers: no other one can be mounted."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from leanq.lean.sandbox.sandbox import probe
from leanq.lean.sandbox.walls import missing_walls

# A user without privileges, who may make namespaces, and to whom a part of /proc is hidden.
INSIDE = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps", "--mount"]
INSIDE += ["sh", "-c", 'mount -t tmpfs none /proc/irq && exec "$@"', "sh"]
INSIDE += ["setpriv", "--inh-caps=-all", "--ambient-caps=-all"]

# Two runs of a program that tells what it sees of /proc: itself, all names, its parent.
LOOK = """
import asyncio, os, sys
from pathlib import Path
from leanq.lean.sandbox.sandbox import Limits, Sandbox

SEEN = '''
import os
print(os.readlink("/proc/self/exe"))
print(sorted(os.listdir("/proc")), os.getpid())
print([name for name in ("environ", "exe") if os.access(f"/proc/{os.getppid()}/{name}", os.R_OK)])
'''

async def look():
    prefixes = sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)
    sandbox = await Sandbox.open(readable=list(map(Path, prefixes)))
    try:
        print(*sandbox.isolation)
        limits = Limits(cpu_s=30, wall_s=60, memory_bytes=1 << 30)
        command = [sys.executable, "-I", "-S", "-c", SEEN]
        for _ in range(2):
            done = await sandbox.run(command, env={}, limits=limits)
            print((done.stdout + done.stderr).decode(), end="")
    finally:
        await sandbox.close()

asyncio.run(look())
"""


@pytest.mark.slow
def test_a_program_sees_itself_and_nothing_else_of_proc() -> None:
    """Loaders find libraries beside a program by /proc/self/exe, and Lean its own folder."""
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("util-linux is not here")
    if missing_walls(probe()):
        pytest.skip("this machine has fewer walls itself")
    command = [*INSIDE, sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "mount:" in done.stderr:
        pytest.skip("no mount over /proc here")
    isolation, *runs = done.stdout.splitlines()
    assert "mount-ns" in isolation.split(), done.stderr
    assert "pid-ns" not in isolation.split()
    assert len(runs) == 6, done.stdout
    for exe, listed, others in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        assert exe.startswith("/")
        names, _, pid = listed.rpartition(" ")
        assert names == str(sorted([pid, "self"]))
        assert others == "[]"
