"""Compares leanq with other queues, round by round: a table, JSON and a plot; see README.md.

Each peer runs in an environment of its own, made from ``peers/NAME.txt``. ``peers/NAME.py`` says
how the peer sends an echo, and its docstring names its settings.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import redis
from load import Plan
from runner import HERE, Outcome, leave_on_sigterm, measure
from servers import version
from table import markdown, summary

import leanq

_INSTALL_S = 90.0
_PLAN = Plan()


@dataclass
class Peer:
    """A queue, the module of ``peers/`` that speaks to it, and the results of each round."""

    name: str
    module: str
    variant: str = ""
    plan: Plan = _PLAN
    python: str = sys.executable
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def requirements(self) -> Path:
        return HERE / "peers" / f"{self.module}.txt"

    @property
    def installs(self) -> bool:
        """True if it has an environment of its own; if not, it runs in ours."""
        return self.requirements.exists()

    @property
    def version(self) -> str:
        """The version that the first line of its requirements pins."""
        if self.installs:
            return self.requirements.read_text().split()[0].partition("==")[2]
        return leanq.__version__ if self.module == "leanq" else redis.__version__

    @property
    def settings(self) -> str:
        source = (HERE / "peers" / f"{self.module}.py").read_text()
        return " ".join((ast.get_docstring(ast.parse(source)) or "").split())


def peers() -> list[Peer]:
    return [
        Peer("redis-py ping-pong", "floor", plan=replace(_PLAN, many=1, large=0)),
        Peer("leanq", "leanq"),
        Peer("RQ", "rq"),
        Peer("Celery", "celery"),
        Peer("Dramatiq", "dramatiq"),
        Peer("arq", "arq"),
        Peer("SAQ", "saq"),
        Peer("taskiq, stream", "taskiq", "stream"),
        Peer("taskiq, list", "taskiq", "list"),
        Peer("BullMQ", "bullmq"),
    ]


def install(requirements: Path, folder: Path) -> str:
    """Makes an environment if there is none; returns its interpreter.

    Raises:
        subprocess.SubprocessError: it cannot be made, or takes too long.
    """
    python, stamp = folder / "bin" / "python", folder / requirements.name
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        print(f"installing {requirements.stem}", file=sys.stderr)
        steps: list[list[str | Path]] = [
            [sys.executable, "-m", "venv", "--clear", folder],
            [python, "-m", "pip", "install", "--quiet", "--no-input", "-r", requirements],
        ]
        for command in steps:
            subprocess.run(
                command, check=True, timeout=_INSTALL_S, stderr=subprocess.PIPE, text=True
            )
        stamp.write_text(requirements.read_text())
    return str(python)


def rounds(everyone: Sequence[Peer], count: int, until_s: float) -> Iterator[Peer]:
    """Yields every peer once per round, with every other round reversed, as time allows."""
    for number in range(count):
        for peer in everyone if number % 2 == 0 else reversed(everyone):
            if time.monotonic() + peer.plan.limit_s > until_s:
                print(f"out of time in round {number + 1}", file=sys.stderr)
                return
            print(f"round {number + 1}: {peer.name}", file=sys.stderr)
            yield peer


def results(everyone: Sequence[Peer], load_before: float) -> dict[str, Any]:
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_name(),
            "load_average_before": round(load_before, 2),
            "python": platform.python_version(),
            "server": version(),
        },
        "plan": asdict(_PLAN),
        "peers": {
            peer.name: {
                "version": peer.version,
                "settings": peer.settings,
                "rounds": [asdict(outcome) for outcome in peer.outcomes],
                **summary(peer.outcomes),
            }
            for peer in everyone
        },
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=14.0, help="no later than this, the end")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="modules of peers/")
    parser.add_argument("--environments", type=Path, default=HERE.parent / ".venv" / "peers")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    leave_on_sigterm()
    until_s = time.monotonic() + options.minutes * 60
    load_before = os.getloadavg()[0]
    everyone = [peer for peer in peers() if not options.only or peer.module in options.only]
    ready = []
    for peer in everyone:
        try:
            if peer.installs:
                peer.python = install(peer.requirements, options.environments / peer.module)
            ready.append(peer)
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
            peer.outcomes.append(Outcome(failed=f"not installed: {said}"))
    for peer in rounds(ready, options.rounds, until_s):
        outcome = measure(peer.module, peer.plan, peer.python, peer.variant)
        peer.outcomes.append(outcome)
        if outcome.failed:
            print(f"{peer.name}: {outcome.failed}", file=sys.stderr)
    found = results(everyone, load_before)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.results / "peers.md").write_text(markdown(found))
    print(markdown(found))
    python = install(HERE / "peers" / "plot.txt", options.environments / "plot")
    subprocess.run([python, HERE / "plot.py", options.results], check=True, timeout=_INSTALL_S)


if __name__ == "__main__":
    main()
