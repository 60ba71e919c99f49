"""Makes the tables of README.md from the runs' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leanq.scale import ScaleSettings
from sim.measure import Figures, Interval, difference, interval, known, quantile
from sim.scenarios import TEN

Runs = Mapping[str, Mapping[str, Sequence[Figures]]]
"""By scenario and policy, a run for each seed."""

MARGIN_S = 15.0
"""Waits that differ by less than a decision's interval count as equal."""

_COLUMNS = {
    "clear_s": ("cleared after, s", "{:.0f}"),
    "p50_s": ("p50 wait, s", "{:.0f}"),
    "p99_s": ("p99 wait, s", "{:.0f}"),
    "cost": ("CPU-hours / pure work", "{:.2f}"),
    "utilization": ("utilization, %", "{:.1f}"),
    "reversals_per_h": ("reversals/h", "{:.1f}"),
    "most_workers": ("most workers", "{:.0f}"),
    "left": ("unfinished", "{:.0f}"),
}


def report(found: Mapping[str, Any]) -> str:
    """Returns all results as Markdown."""
    runs: Runs = found["runs"]
    seeds = found["seeds"]
    lines = [
        f"{seeds} seeds from {found['first']}, Python {found['python']}, {found['minutes']:.0f} "
        f"minutes in {found['processes']} processes; mean (95 % confidence interval).",
        "",
        *_targets(runs),
        "",
        "### Against the reference",
        "",
        *_against(runs),
        "",
        "### Every scenario and policy",
        "",
        *_everything(runs, found["texts"]),
    ]
    return "\n".join(lines) + "\n"


def _targets(runs: Runs) -> list[str]:
    lines = ["| target | reached | |", "| --- | --- | --- |"]

    def row(target: str, reached: str, met: bool) -> None:
        lines.append(f"| {target} | {reached} | {'met' if met else '**missed**'} |")

    burst = runs["burst"]["deadline"]
    clear = known(burst, "clear_s")
    slow = quantile(clear, 0.95) if clear else float("inf")
    most_s = ScaleSettings().deadline_s
    target = f"burst cleared within {most_s:.0f} s at the 95th percentile of seeds"
    row(target, f"{slow:.0f} s", slow <= most_s)
    cost = interval(known(burst, "cost"))
    row("burst at ≤ 1.8 × pure work", _of(cost, "{:.2f}"), cost.high <= 1.8)
    for name in ("steady", "storm"):
        use = interval(known(runs[name]["deadline"], "utilization"))
        target = f"utilization ≥ 90 %, start-up included: {name}"
        row(target, _of(use, "{:.1f}"), use.mean >= 90)
    reversals = interval(known(runs["steady"]["deadline"], "reversals_per_h"))
    row("≤ 2 reversals an hour: steady", _of(reversals, "{:.1f}"), reversals.high <= 2)
    verdicts = [verdict(runs[scenario.name]) for scenario in TEN]
    better = sum(v.startswith("better") for v in verdicts)
    strictly = sum(v == "better in both" for v in verdicts)
    both = sum(v == "worse in both" for v in verdicts)
    target = "cheaper than the reference at equal or better p99 wait in ≥ 6 of the 10"
    row(target, f"{better}, {strictly} of them better in both", better >= 6)
    row("never worse than the reference in both", f"{both} worse", not both)
    lost = sum(sum(known(policies["deadline"], "lost")) for policies in runs.values())
    count = sum(len(policies["deadline"]) for policies in runs.values())
    row("no request lost", f"{lost:.0f} in {count} runs", not lost)
    return lines


def verdict(policies: Mapping[str, Sequence[Figures]]) -> str:
    """Compares the deadline policy with the reference, by the intervals of their differences."""
    cost = difference(policies["deadline"], policies["reference"], "cost")
    wait = difference(policies["deadline"], policies["reference"], "p99_s")
    if cost.high < 0 and wait.high < 0:
        return "better in both"
    if cost.high < 0 and wait.high <= MARGIN_S:
        return "better in cost, equal in wait"
    if cost.low > 0 and wait.low > 0:
        return "worse in both"
    cheaper = "cheaper" if cost.high < 0 else "dearer" if cost.low > 0 else "as dear"
    slower = "slower" if wait.low > 0 else "faster" if wait.high < 0 else "as fast"
    return f"{cheaper}, {slower}"


def _against(runs: Runs) -> list[str]:
    lines = [
        "Deadline less reference, in pairs of the same seed.",
        "",
        "| scenario | CPU-hours / pure work | p99 wait, s | |",
        "| --- | --- | --- | --- |",
    ]
    for name, policies in runs.items():
        cost = difference(policies["deadline"], policies["reference"], "cost")
        wait = difference(policies["deadline"], policies["reference"], "p99_s")
        cells = f"{_of(cost, '{:+.2f}')} | {_of(wait, '{:+.1f}')}"
        lines.append(f"| {name} | {cells} | {verdict(policies)} |")
    return lines


def _everything(runs: Runs, texts: Mapping[str, str]) -> list[str]:
    lines = []
    for name, policies in runs.items():
        titles = " | ".join(title for title, _ in _COLUMNS.values())
        lines += [f"**{name}**: {texts[name]}", "", f"| policy | {titles} |"]
        lines.append("| --- " * (len(_COLUMNS) + 1) + "|")
        for policy, figures in policies.items():
            cells = " | ".join(_cell(figures, column) for column in _COLUMNS)
            lines.append(f"| {policy} | {cells} |")
        lines.append("")
    return lines[:-1]


def _cell(runs: Sequence[Figures], column: str) -> str:
    values = known(runs, column)
    if not values:
        return "–"
    found = interval(values)
    form = _COLUMNS[column][1]
    if column in ("p99_s", "cost", "clear_s"):
        return _of(found, form)
    return form.format(found.mean)


def _of(found: Interval, form: str) -> str:
    low, high = form.format(found.low), form.format(found.high)
    return f"{form.format(found.mean)} ({low} – {high})"
