"""Draws peers.json of a folder as peers.png beside it; needs an environment with matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

_CHARTS = {
    "p50_ms": "← p50 with one outstanding, ms",
    "p99_ms": "← p99 with one outstanding, ms",
    "server_us_per_request": "← server CPU per request, µs",
    "rps": "requests/s, 100 bytes, 1000 outstanding →",
    "rps_64k": "requests/s, 64 KiB, 200 outstanding →",
    "commands_per_request": "← commands per request",
}
_OURS, _FLOOR, _THEIRS = "#0b6e4f", "#9aa5b1", "#4c6ef5"


def draw(peers: dict[str, Any], path: Path) -> None:
    """Draws one chart per figure, with logarithmic axes: a dot at the median, a line for the range.

    Arrows in the titles point to the better side.
    """
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), sharey=True, layout="constrained")
    names = list(reversed(peers))
    for axis, (key, title) in zip(axes.flat, _CHARTS.items(), strict=True):
        for place, name in enumerate(names):
            peer = peers[name]
            alone = name == "redis-py ping-pong" and key == "rps"  # with one request outstanding
            if key not in peer["median"] or alone:
                continue
            median, low, high = (peer[which][key] for which in ("median", "low", "high"))
            colour = {"leanq": _OURS, "redis-py ping-pong": _FLOOR}.get(name, _THEIRS)
            axis.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.4)
            axis.plot(median, place, "o", color=colour)
            axis.annotate(
                f"{median:,.0f}" if median >= 100 else f"{median:.3g}",
                (high, place), (7, 0), textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
        axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="y", color="#e5e7eb")
        axis.set_axisbelow(True)
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(names)), names)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "peers.json").read_text())["peers"], folder / "peers.png")
