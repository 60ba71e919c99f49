"""A small fleet at work, a fault that nobody is told of, and what shows it after how long.

Two workers with real Lean, a server that writes to its disk, a gateway with the keys of two
tenants, an exporter, and Prometheus with the rules and intervals of ``deploy/observability``.
After some minutes of a steady trickle one fault begins. The program then notes when alerts fire,
the page's warnings, and which series of the dashboard left the range that they had before. It
decides nothing: a person reads what it prints.

    make find-faults LEAN=/opt/lean/bin/lean FAULTS="slow-redis broken-lean"

It needs ``prometheus``, and for some faults ``cc``, or FUSE and ``mfusepy``.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import http.cookiejar
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import redis
import yaml
from support.cluster import free_ports
from support.gateway.gateways import key_file
from support.lean.sandboxes import children
from support.paths import ROOT
from support.producer.troubled_machine import TroubledMachine
from support.servers import find_server
from support.terminals import LEANQ

OBSERVABILITY = ROOT / "deploy" / "observability"
# The fault begins once rates of five minutes have something to compare with.
QUIET_S, WATCH_S, STEP_S = 150.0, 300.0, 5.0
READY_S = 120.0
TENANTS = ("alice", "bob")
TEXT = "import Init\ntheorem t{n} (a b : Nat) (h : a = b) : b = a := h.symm\n"
WRONG = "import Init\ntheorem t{n} (a b : Nat) : a = b := rfl\n"
# Its header is another one each time in turn, which Lean imports anew.
RARE = ("Init.Data.List", "Init.Data.Nat", "Init.Omega", "Init.Data.Array", "Init.Data.Int")


class Fleet:
    """What a small operator has, and what a fault can befall."""

    def __init__(
        self, folder: Path, lean: Path, stack: contextlib.ExitStack, *, on_disk: bool
    ) -> None:
        self.folder = folder
        self.stack = stack
        self.machine = TroubledMachine(folder / "machine")
        self.rate_per_s = dict.fromkeys(TENANTS, 0.4)
        self.sent: dict[str, list[tuple[int, float]]] = {name: [] for name in TENANTS}
        (self.redis, self.exporter, self.gateway, self.gateway_metrics, *self.metrics) = free_ports(
            6
        )
        (self.prometheus,) = free_ports(1)
        self._start_server()
        self.environ = {
            **{name: text for name, text in os.environ.items() if name[:6] != "LEANQ_"},
            "LEANQ_URL": f"redis://127.0.0.1:{self.redis}",
            "LEANQ_CACHE": str(folder / "cache"),
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }
        self.toolchains = []
        for number in range(2):
            own = folder / f"lean{number}"
            shutil.copytree(lean.resolve().parents[1], own, symlinks=True)
            self.toolchains.append(own)
        self.disk: Any = None
        if on_disk:
            from support.lean.slow_mount import SlowMount

            self.disk = stack.enter_context(SlowMount(own, folder / "disk", 0.0))
            self.toolchains[1] = self.disk.at
        self.workers: list[subprocess.Popen[bytes]] = []

    def _start_server(self) -> None:
        options = ["--port", str(self.redis), "--save", "", "--appendonly", "yes"]
        self.run(
            [str(find_server()), *options, "--dir", str(self.folder)], "redis", self.machine.environ
        )

    def run(
        self, command: list[str], name: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **(environ or {})}, stdout=log, stderr=log
            )

        def end() -> None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)

        self.stack.callback(end)
        return process

    def leanq(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.run([*LEANQ, *arguments], name, self.environ)

    def start(self) -> None:
        for number in range(2):
            lean, port = self.toolchains[number] / "bin" / "lean", self.metrics[number]
            told = ("--slots", "1", "--lean", str(lean), "--metrics-port", str(port))
            self.workers.append(self.leanq(f"worker{number}", "worker", *told))
        self.leanq("exporter", "metrics", "--port", str(self.exporter))
        keys = [{"secret": name, "rights": ["submit", "status"]} for name in TENANTS]
        file = key_file(self.folder, *keys, {"secret": "operator", "rights": ["operate", "status"]})
        ports = ("--port", str(self.gateway), "--metrics-port", str(self.gateway_metrics))
        self.leanq("gateway", "serve", *ports, "--keys", str(file))
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
        config["rule_files"] = [str(OBSERVABILITY / "alerts.yaml")]
        jobs = (("fleet", [self.exporter]), ("workers", self.metrics))
        config["scrape_configs"] = [
            {
                "job_name": f"leanq-{job}",
                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
            }
            for job, ports in (*jobs, ("gateways", [self.gateway_metrics]))
        ]
        place = self.folder / "prometheus.yml"
        place.write_text(yaml.safe_dump(config))
        options = (f"--config.file={place}", f"--storage.tsdb.path={self.folder / 'data'}")
        listen = f"--web.listen-address=127.0.0.1:{self.prometheus}"
        self.run(["prometheus", *options, listen], "prometheus")

    def ask(self, query: str) -> dict[str, float]:
        """The answer of Prometheus: each series' labels, and its value."""
        words = urllib.parse.urlencode({"query": query})
        found = read(f"http://127.0.0.1:{self.prometheus}/api/v1/query?{words}")
        series = found["data"]["result"] if found["data"]["resultType"] == "vector" else []
        return {
            ",".join(f"{k}={v}" for k, v in sorted(each["metric"].items())): float(each["value"][1])
            for each in series
        }

    def alerts(self) -> set[tuple[str, str]]:
        told = read(f"http://127.0.0.1:{self.prometheus}/api/v1/alerts")["data"]["alerts"]
        return {(each["labels"]["alertname"], each["state"]) for each in told}

    def check(self, tenant: str, code: str, timeout_s: float = 120.0) -> int:
        """The HTTP status of a check through the gateway."""
        header = {"Authorization": f"Bearer {tenant}", "Content-Type": "application/json"}
        body = json.dumps({"code": code}).encode()
        asked = urllib.request.Request(f"{self.url}/v1/check", body, header)
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway}"

    def page(self) -> list[str]:
        """The lines of the page, as an operator sees it."""
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        browser = urllib.request.build_opener(jar)
        browser.addheaders = [("Accept", "text/html")]
        form = urllib.parse.urlencode({"key": "operator"}).encode()
        asked = urllib.request.Request(f"{self.url}/page/login", form, {"Origin": self.url})
        with browser.open(asked, timeout=20) as answer:
            text = re.sub(r"(?s)<script.*?</script>|<[^>]+>", "\n", answer.read().decode())
        return [line for line in map(str.strip, html.unescape(text).splitlines()) if line]


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


@contextlib.contextmanager
def traffic(fleet: Fleet) -> Iterator[None]:
    """Checks of both tenants through the gateway, until the context ends."""
    over = threading.Event()

    def send(tenant: str, n: int) -> None:
        text = (WRONG if n % 5 == 0 else TEXT).format(n=f"{tenant}{n}")
        if n % 10 == 3:
            text = text.replace("import Init", f"import {RARE[n // 10 % len(RARE)]}")
        began_s = time.monotonic()
        status = fleet.check(tenant, text)
        fleet.sent[tenant].append((status, time.monotonic() - began_s))

    def trickle(tenant: str) -> None:
        for n in itertools.count():
            if over.wait(1 / fleet.rate_per_s[tenant]):
                return
            if threading.active_count() < 400:
                threading.Thread(target=send, args=(tenant, n), daemon=True).start()

    for tenant in TENANTS:
        threading.Thread(target=trickle, args=(tenant,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


# Faults


def slow_redis(fleet: Fleet) -> None:
    """The disk of the server takes four seconds for each write."""
    fleet.machine.slow_down(4.0)


def slow_library(fleet: Fleet) -> None:
    """The second worker's toolchain is on a disk that takes 20 ms for each operation."""
    assert fleet.disk
    fleet.disk.slow.latency_s = 0.02


def broken_library(fleet: Fleet) -> None:
    """On the second machine a part of Lean's library is gone."""
    (fleet.toolchains[1] / "lib" / "lean" / "Init").rename(fleet.folder / "gone")


def broken_lean(fleet: Fleet) -> None:
    """On the second machine compiled files are cut short, as by a disk that was full."""
    for file in (fleet.toolchains[1] / "lib" / "lean" / "Init" / "Data").rglob("*.olean"):
        os.truncate(file, file.stat().st_size // 2)


def stopped_forks(fleet: Fleet) -> None:
    """On the second machine the process that forks stands still."""
    for pid in zygotes(fleet.workers[1].pid):
        os.kill(pid, signal.SIGSTOP)


def full_redis(fleet: Fleet) -> None:
    """The server has no memory for more."""
    with redis.Redis(port=fleet.redis) as connection:
        used = int(connection.info("memory")["used_memory"])
        connection.config_set("maxmemory", used - (1 << 16))


def flood(fleet: Fleet) -> None:
    """Bob sends three hundred times as much as before, which is more than two workers can do."""
    fleet.rate_per_s["bob"] = 120.0


FAULTS: dict[str, Callable[[Fleet], None]] = {
    "slow-redis": slow_redis,
    "slow-library": slow_library,
    "broken-library": broken_library,
    "broken-lean": broken_lean,
    "stopped-forks": stopped_forks,
    "full-redis": full_redis,
    "flood": flood,
}


def zygotes(pid: int) -> list[int]:
    """The processes below ``pid`` that have imported a header and wait for texts."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"zygote" in words:
                found.append(child)
        found += zygotes(child)
    return found


# What is seen


def panels() -> list[tuple[str, str]]:
    """The dashboard's queries over time, each with its panel's title."""
    board = json.loads((OBSERVABILITY / "dashboard.json").read_text())
    return [
        (
            panel["title"],
            target["expr"].replace("$environment", ".*").replace("$__rate_interval", "1m"),
        )
        for panel in board["panels"]
        if panel["type"] in ("timeseries", "stat")
        for target in panel["targets"]
    ]


class Watch:
    """The ranges of all series while all was well, and what has left them since."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._queries = panels()
        self._usual: dict[tuple[str, str], tuple[float, float]] = {}

    def look(self) -> Iterator[tuple[str, str, float]]:
        for title, query in self._queries:
            for labels, value in self._fleet.ask(query).items():
                if value == value:
                    yield title, labels, value

    def learn(self) -> None:
        for title, labels, value in self.look():
            low, high = self._usual.get((title, labels), (value, value))
            self._usual[title, labels] = min(low, value), max(high, value)

    def moved(self) -> Iterator[tuple[str, str, float, float]]:
        """Yields what is far out of its range: panel, labels, its value, and its usual most."""
        for title, labels, value in self.look():
            low, high = self._usual.get((title, labels), (0.0, 0.0))
            room = max(high - low, 0.5 * abs(high), 0.02)
            if not low - room <= value <= high + room:
                yield title, labels, value, high


def trial(name: str, lean: Path) -> None:
    fault = FAULTS[name]

    def tell(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="leanq-faults-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        fleet = Fleet(folder, lean, stack, on_disk=fault is slow_library)
        fleet.start()
        tell(f"{fault.__doc__} Logs: {folder}")
        stack.enter_context(ready(fleet))
        stack.enter_context(traffic(fleet))
        watch, began_s = Watch(fleet), time.monotonic()
        while time.monotonic() - began_s < QUIET_S:
            time.sleep(STEP_S)
            if time.monotonic() - began_s > QUIET_S / 3:
                watch.learn()
        before, seen = {re.sub(r"\d[\d.,]*", "0", line) for line in fleet.page()}, fleet.alerts()
        assert len(before) > 10, f"the gateway shows no page: {before}"
        tell(f"all is well; alerts: {sorted(seen)}; checks: {summary(fleet)}")
        for sent in fleet.sent.values():
            sent.clear()
        fault(fleet)
        began_s = time.monotonic()
        known: set[tuple[str, str]] = set()
        while (since_s := time.monotonic() - began_s) < WATCH_S:
            time.sleep(STEP_S)
            for each in sorted(fleet.alerts() - seen):
                seen.add(each)
                tell(f"{since_s:4.0f} s  alert {each[0]} is {each[1]}")
            for title, labels, value, usual in watch.moved():
                if (title, labels) not in known:
                    known.add((title, labels))
                    tell(
                        f"{since_s:4.0f} s  panel {title!r} {labels}: {value:.3g}, not {usual:.3g}"
                    )
            with contextlib.suppress(OSError):
                for line in fleet.page():
                    shape = re.sub(r"\d[\d.,]*", "0", line)
                    if shape not in before and re.search(r"[a-z]{3} .*\.$", line):
                        before.add(shape)
                        tell(f"{since_s:4.0f} s  page: {line}")
        tell(f"checks since: {summary(fleet)}; workers: {[w.poll() for w in fleet.workers]}")


@contextlib.contextmanager
def ready(fleet: Fleet) -> Iterator[None]:
    """Waits until both workers serve, a check has its verdict, and Prometheus has looked."""
    began_s = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            done = all(b"serves" in (fleet.folder / f"worker{n}.log").read_bytes() for n in (0, 1))
            if done and fleet.check("alice", TEXT.format(n="")) == 200 and fleet.ask("leanq_up"):
                break
        assert time.monotonic() - began_s < READY_S, "the fleet does not come up"
        time.sleep(0.5)
    yield


def summary(fleet: Fleet) -> str:
    told = []
    for tenant, sent in fleet.sent.items():
        times_s = sorted(took_s for _, took_s in sent)
        bad = sum(status != 200 for status, _ in sent)
        middle = times_s[len(times_s) // 2] if times_s else 0.0
        told.append(f"{tenant} {len(sent)}, {bad} not answered, median {middle:.2f} s")
    return "; ".join(told)


def main() -> None:
    """Runs the trials that were asked for, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lean", type=Path, required=True, help="of a toolchain with a library")
    parser.add_argument("faults", nargs="*", default=[*FAULTS], choices=[*FAULTS, []])
    options = parser.parse_args()
    for name in options.faults:
        trial(name, options.lean)


if __name__ == "__main__":
    main()
