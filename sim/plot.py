"""Draws results.json as PNG files beside it: cost against wait, and the fleets' courses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from sim.measure import interval, known

_COLOURS = {
    "deadline": "#0b6e4f",
    "reference": "#4c6ef5",
    "HPA 90 %": "#e8590c",
    "KEDA 5": "#9c36b5",
    "oracle": "#9aa5b1",
}


def trade(found: dict[str, Any], path: Path) -> None:
    """Draws a chart per scenario: cost to the right, p99 wait upwards, intervals as crosses.

    Points nearer to the corner are better.
    """
    runs = found["runs"]
    figure, axes = plt.subplots(3, 4, figsize=(15, 10), layout="constrained")
    for axis, (name, policies) in zip(axes.flat, runs.items(), strict=False):
        for policy, figures in policies.items():
            cost, wait = (interval(known(figures, what)) for what in ("cost", "p99_s"))
            axis.errorbar(
                cost.mean, wait.mean,
                xerr=[[cost.mean - cost.low], [cost.high - cost.mean]],
                yerr=[[max(0.0, wait.mean - wait.low)], [wait.high - wait.mean]],
                fmt="o", color=_COLOURS[policy], label=policy,
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_title(name, fontsize=10)
        axis.grid(color="#e5e7eb")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="x", which="both", labelsize=7)
    for axis in axes.flat[len(runs) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("CPU-hours / pure work")
    figure.supylabel("p99 wait, s")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def courses(found: dict[str, Any], path: Path) -> None:
    """Draws the first seed's order of workers (lines), and the queue under our policy (grey)."""
    lines = found["courses"]
    figure, axes = plt.subplots(3, 4, figsize=(15, 10), layout="constrained")
    for axis, (name, policies) in zip(axes.flat, lines.items(), strict=False):
        beside = axis.twinx()
        minutes, queue = zip(*policies["deadline"]["queue"], strict=True)
        beside.fill_between([m / 60 for m in minutes], queue, color="#d0d5db", zorder=0)
        beside.tick_params(labelsize=7, colors="#868e96")
        axis.set_zorder(beside.get_zorder() + 1)
        axis.patch.set_visible(False)
        for policy in ("reference", "HPA 90 %", "oracle", "deadline"):
            times, orders = zip(*policies[policy]["orders"], strict=True)
            end = policies[policy]["queue"][-1][0]
            axis.step(
                [t / 60 for t in (*times, end)], [*orders, orders[-1]], where="post",
                color=_COLOURS[policy], label=policy, linewidth=1.8 if policy == "deadline" else
                1.1,
            )  # fmt: skip
        most = max(
            order for policy in ("deadline", "oracle") for _, order in policies[policy]["orders"]
        )
        axis.set_ylim(0, 2.2 * most)
        axis.set_title(name, fontsize=10)
        axis.spines[["top"]].set_visible(False)
        beside.spines[["top"]].set_visible(False)
    for axis in axes.flat[len(lines) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("minutes")
    figure.supylabel(
        "workers ordered; grey, at the right: requests that wait under the deadline policy"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw(folder: Path) -> None:
    found = json.loads((folder / "results.json").read_text())
    trade(found, folder / "trade.png")
    courses(found, folder / "courses.png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
