"""Prints the rounds as a table: medians, with the lowest and highest beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from runner import Outcome

COLUMNS = {
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "rps": "requests/s, 1000 outstanding",
    "rps_64k": "requests/s, 64 KiB both ways, 200 outstanding",
    "server_us_per_request": "server CPU, µs/request",
    "commands_per_request": "commands/request",
}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns median, lowest and highest of each figure, the number of failed rounds, and why."""
    figures = {
        name: [outcome.figures[name] for outcome in outcomes if name in outcome.figures]
        for name in COLUMNS
    }
    known = {name: values for name, values in figures.items() if values}
    return {
        "median": {name: statistics.median(values) for name, values in known.items()},
        "low": {name: min(values) for name, values in known.items()},
        "high": {name: max(values) for name, values in known.items()},
        "failed": [outcome.failed for outcome in outcomes if outcome.failed],
    }


def markdown(found: dict[str, Any]) -> str:
    """Returns the table, then the failures, then every queue's version and settings."""
    machine = found["machine"]
    count = max(len(peer["rounds"]) for peer in found["peers"].values())
    lines = [
        f"{machine['cpus']} CPUs ({machine['cpu']}), Python {machine['python']}, "
        f"{machine['server']}, load average before {machine['load_average_before']}; "
        f"{count} rounds: median (lowest – highest).",
        "",
        "| queue | " + " | ".join(COLUMNS.values()) + " |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for name, peer in found["peers"].items():
        cells = " | ".join(_cell(peer, column) for column in COLUMNS)
        lines.append(f"| {name} | {cells} |")
    lines.append("")
    for name, peer in found["peers"].items():
        if peer["failed"]:
            reasons = "; ".join(sorted(set(peer["failed"])))
            lines.append(f"- {name} failed in {len(peer['failed'])} rounds: {reasons}")
    lines.append("")
    notes = {peer["settings"]: peer["version"] for peer in found["peers"].values()}
    for settings, version in notes.items():
        name, _, rest = settings.partition(": ")
        lines.append(f"- **{name}** {version}: {rest}")
    return "\n".join(lines) + "\n"


def _cell(peer: dict[str, Any], column: str) -> str:
    if column not in peer["median"]:
        return "failed" if peer["failed"] else "–"
    median, low, high = (peer[which][column] for which in ("median", "low", "high"))
    return f"{_digits(median)} ({_digits(low)} – {_digits(high)})"


def _digits(value: float) -> str:
    """Returns a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
