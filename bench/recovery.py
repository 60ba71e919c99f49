"""Seconds from SIGKILL of a worker, of the server, of the gateway until all requests have ended.

Two workers check small texts with real Lean. In each round a client sends texts, and one process
dies by SIGKILL while they run. The server and the gateway start again at once, as an orchestrator
would have it; of the workers one stays. Prints the medians of the seconds until each text has its
verdict, as a line of JSON; ``undisturbed_s`` is the same without a death, and ``lost`` counts
texts without a verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

import redis
from places import LEANQ

from leanq import LeanQClient, LeanQError
from leanq.local import find_server

_TEXTS = 400
_START_S = 60.0
_END_S = 180.0
# Who dies, and the name of what is measured.
_VICTIMS = {
    "undisturbed": "undisturbed_s",
    "worker": "worker_s",
    "server": "server_s",
    "gateway": "gateway_s",
}


class Fleet:
    """A server that keeps what it acknowledged, two workers and a gateway, in one folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._ports = {"server": _free_port(), "gateway": _free_port()}
        self.url = f"redis://127.0.0.1:{self._ports['server']}"
        self.gateway_url = f"http://localhost:{self._ports['gateway']}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("server", "worker", "worker that stays", "gateway"):
            self.start(name)

    def start(self, name: str) -> None:
        """Starts a process, and waits until it serves."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            self._processes[name] = child = subprocess.Popen(
                self._command(name), cwd=self._folder, stdout=output, stderr=output
            )
        self._stack.callback(_end, child)
        until_s = time.monotonic() + _START_S
        while name.startswith("worker") and b" serves " not in log.read_bytes():
            if time.monotonic() > until_s:
                sys.exit(f"the {name} does not start: {log.read_text()}")
            time.sleep(0.02)

    def _command(self, name: str) -> list[str]:
        if name == "server":
            port = str(self._ports[name])
            keeps = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
            return [str(find_server()), "--port", port, "--bind", "127.0.0.1", *keeps]
        if name == "gateway":
            return [*LEANQ, "serve", "--url", self.url, "--port", str(self._ports[name])]
        return [*LEANQ, "worker", "--url", self.url, "--slots", "1"]

    def kill(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def wait(self) -> None:
        """Waits until server and gateway answer."""
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            try:
                with redis.Redis.from_url(self.url) as connection:
                    connection.ping()
                urllib.request.urlopen(f"{self.gateway_url}/v1/requests/none", timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == HTTPStatus.NOT_FOUND:  # its queue has said so
                    return
            except (redis.RedisError, OSError):
                pass
            time.sleep(0.02)
        sys.exit("the fleet does not start")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_START_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def round_s(fleet: Fleet, victim: str, number: int) -> tuple[float, int]:
    """Returns the seconds from a death to the last verdict, and how many texts have none."""
    fleet.wait()
    texts = [f"theorem t_{victim}_{number}_{n} (p : Prop) (h : p) : p := h" for n in range(_TEXTS)]
    url = fleet.gateway_url if victim == "gateway" else fleet.url
    with LeanQClient(url) as lean:
        futures = [lean.check(text) for text in texts]
        for future in futures[: _TEXTS // 4]:
            future.result(_END_S)
        began_s = time.monotonic()
        if victim != "undisturbed":
            fleet.kill(victim)
        if victim in ("server", "gateway"):
            fleet.start(victim)
        lost = 0
        for future in futures:
            try:
                lost += future.result(_END_S).verdict != "accepted"
            except LeanQError as error:
                print(f"{victim}: {error}", file=sys.stderr)
                lost += 1
        took_s = time.monotonic() - began_s
    if victim == "worker":
        fleet.start(victim)
    return took_s, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    took_s: dict[str, list[float]] = {victim: [] for victim in _VICTIMS}
    lost = 0
    with (
        tempfile.TemporaryDirectory(prefix="leanq-bench-", dir=os.environ.get("TMPDIR")) as folder,
        contextlib.ExitStack() as stack,
    ):
        fleet = Fleet(Path(folder), stack)
        for number in range(options.rounds):
            for victim in _VICTIMS:
                seconds, missing = round_s(fleet, victim, number)
                took_s[victim].append(seconds)
                lost += missing
    medians = {
        _VICTIMS[victim]: round(statistics.median(all_s), 2) for victim, all_s in took_s.items()
    }
    print(json.dumps({**medians, "lost": lost}))
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
