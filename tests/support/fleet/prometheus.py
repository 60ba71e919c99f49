"""A real Prometheus with the rules of deploy/observability, for which time passes faster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from support.cluster import free_ports
from support.paths import ROOT
from support.required import missing
from support.waiting import eventually

ALERTS = ROOT / "deploy" / "observability" / "alerts.yaml"
# No rule has to hold for longer.
LONGEST_S = 30.0
FIRES_S = 150.0

_DURATION = re.compile(r"(?<=\[)(\d+)([mh])(?=\])|(?<=for: )(\d+)([mh])$", re.MULTILINE)


def hurried(rules: str, minute_s: float) -> str:
    """The rules with windows and ``for`` in which a minute takes ``minute_s``."""

    def seconds(match: re.Match[str]) -> str:
        long_s = int(match[1] or match[3]) * {"m": 1, "h": 60}[match[2] or match[4]] * minute_s
        return f"{min(long_s, LONGEST_S) if match[3] else long_s:g}s"

    return _DURATION.sub(seconds, rules)


@dataclass
class Prometheus:
    """A Prometheus that scrapes and evaluates once a second."""

    url: str

    def alerts(self) -> dict[str, str]:
        """The alerts that fire, and each one's labels as text."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.url}/api/v1/alerts") as got,
        ):
            return {
                each["labels"]["alertname"]: " ".join(each["labels"].values())
                for each in json.load(got)["data"]["alerts"]
                if each["state"] == "firing"
            }
        return {}

    async def tells(self, query: str) -> None:
        """Waits until the query has an answer."""
        words = urllib.parse.urlencode({"query": query})

        def asked() -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/api/v1/query?{words}") as got,
            ):
                return bool(json.load(got)["data"]["result"])
            return False

        await eventually(lambda: asyncio.to_thread(asked), FIRES_S)

    async def fires(self, *names: str) -> None:
        """Waits until each of the alerts has fired."""
        seen: set[str] = set()

        async def fired() -> bool:
            seen.update(await asyncio.to_thread(self.alerts))
            return seen.issuperset(names)

        try:
            await eventually(fired, FIRES_S)
        except AssertionError:
            raise AssertionError(f"{set(names) - seen} did not fire; {seen} did") from None


@contextlib.contextmanager
def prometheus(folder: Path, ports: Collection[int], minute_s: float = 1.0) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these ports of this machine."""
    rules, config = folder / "alerts.yaml", folder / "prometheus.yml"
    rules.write_text(hurried(ALERTS.read_text(), minute_s))
    targets = [f"127.0.0.1:{port}" for port in ports]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    jobs = [{"job_name": "leanq", "static_configs": [{"targets": targets}]}]
    config.write_text(
        yaml.safe_dump({"global": every, "rule_files": [str(rules)], "scrape_configs": jobs})
    )
    (port,) = free_ports(1)
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    # What is not seen for so long is gone.
    options += [f"--web.listen-address=127.0.0.1:{port}", "--query.lookback-delta=10s"]
    try:
        process = subprocess.Popen(["prometheus", *options], stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        missing("prometheus (.ci/run installs it)")
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)
