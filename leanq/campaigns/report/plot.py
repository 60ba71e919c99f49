"""A report as a plot. Importing this needs matplotlib (``leanq[campaigns]``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from leanq.campaigns.report.comparison import Comparison, kind_of
from leanq.campaigns.report.figures import CPU_EDGES_S, Pass, Report
from leanq.campaigns.report.outcomes import ENDS, INFRASTRUCTURE

_COLOURS = {
    "accepted": "#2a9d5c",
    "incomplete": "#e0a526",
    "rejected": "#c8453b",
    "unverified": "#c9763a",
    "exhausted": "#8c5a3c",
    "cancelled": "#a9b0b7",
    "error": "#3d434a",
    "none": "#a9b0b7",
    **dict.fromkeys(INFRASTRUCTURE, "#7a5fb0"),
}
_OLD = "#8d959d"
_NEW = "#2468a8"
_KINDS = {"gained": _COLOURS["accepted"], "lost": _COLOURS["rejected"], "other": _OLD}
_INK = "#2b2f33"
_TRANSITIONS = 8
_DPI = 150


def draw(path: Path, found: Report, before: Report | None, comparison: Comparison | None) -> None:
    """Writes a PNG to ``path``: verdicts, their CPU times and pass@k, and what changed if there is
    an older report. Raises OSError."""
    ends = [end for end in ENDS if end in found.ends or (before and end in before.ends)]
    height = 1.6 + 0.38 * max(4, len(ends))
    space = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15, wspace=0.04, hspace=0.05)
    figure = Figure(figsize=(11.5, height + 3.6), layout=space)
    axes = figure.subplots(2, 2, height_ratios=(height - 1, 2.9))
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors=_INK, labelsize=9)
    _verdicts(axes[0, 0], ends, found, before)
    _cpu_times(axes[0, 1], ends, found)
    _passes(axes[1, 0], found, before.passes if before else ())
    if comparison:
        _transitions(axes[1, 1], comparison)
    else:
        _quantiles(axes[1, 1], found)
    figure.savefig(path, format="png", dpi=_DPI)


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    """One row for each label, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _verdicts(axes: Axes, ends: Sequence[str], found: Report, before: Report | None) -> None:
    _title(axes, f"Verdicts of {found.records:,} records" + (" (grey: before)" if before else ""))
    _rows(axes, ends)
    shares = [found.ends.get(end, 0) / found.records for end in ends]
    colours = [_COLOURS[end] for end in ends]
    most = max(shares)
    if before:
        older = [before.ends.get(end, 0) / max(1, before.records) for end in ends]
        most = max(most, *older)
        places = [place + 0.24 for place in range(len(ends))]
        axes.barh(places, older, height=0.2, color="#c9ced3")
    places = [place - (0.1 if before else 0) for place in range(len(ends))]
    axes.barh(places, shares, height=0.46 if before else 0.6, color=colours)
    for place, end, share in zip(places, ends, shares, strict=True):
        label = f" {found.ends.get(end, 0):,}  ({100 * share:.1f} %)"
        axes.text(share, place, label, va="center", fontsize=9, color=_INK)
    # Room for the label of the longest bar.
    axes.set_xlim(0, most * 1.35)
    _no_scale(axes)


def _cpu_times(axes: Axes, ends: Sequence[str], found: Report) -> None:
    _title(axes, "CPU time by verdict (tick: median)")
    _rows(axes, ends)
    for place, end in enumerate(ends):
        counts = found.cpu_bins.get(end)
        if counts is None:
            axes.text(0.01, place, "–", transform=axes.get_yaxis_transform(), va="center")
            continue
        # Each verdict has its own scale: rare ones would be flat otherwise.
        tops = [place + 0.35 - 0.75 * count / max(counts) for count in counts]
        floor = place + 0.35
        axes.stairs(tops, CPU_EDGES_S, baseline=floor, fill=True, color=_COLOURS[end], alpha=0.55)
        median = min(max(found.cpu_median_s[end], CPU_EDGES_S[0]), CPU_EDGES_S[-1])
        axes.plot([median, median], [place - 0.4, floor], color=_INK, linewidth=1.4)
    axes.set_xscale("log")
    used = [i for counts in found.cpu_bins.values() for i, count in enumerate(counts) if count]
    if used:
        # Whole decades, so that there are marks to read the bins by.
        low, high = CPU_EDGES_S[min(used)], CPU_EDGES_S[max(used) + 1]
        axes.set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    _time_axis(axes)


def _time_axis(axes: Axes) -> None:
    marks = {1e-3: "1 ms", 1e-2: "10 ms", 0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min"}
    marks |= {600: "10 min", 3600: "1 h", 36000: "10 h"}
    axes.xaxis.set_major_locator(FixedLocator(list(marks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: marks.get(s, f"{s:g} s")))
    axes.grid(axis="x", color="#e3e6e9", linewidth=0.8)
    axes.set_axisbelow(True)


def _passes(axes: Axes, found: Report, older: Sequence[Pass]) -> None:
    too_high = " (too high: samples were cancelled)" if found.cancelled else ""
    _title(axes, f"pass@k with its 95% interval{too_high}")
    for curve, colour, label in ((older, _OLD, "before"), (found.passes, _NEW, "now")):
        if curve:
            _curve(axes, curve, colour, label)
    every = sorted({each.k for each in (*found.passes, *older)})
    if not every:
        _nothing(axes, "no samples")
        return
    axes.set_xscale("log", base=2)
    # The first label needs room, too.
    axes.set_xlim(every[0] / 2, every[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator(every))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:g}"))
    axes.set_xlabel("k", fontsize=9, color=_INK)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y", color="#e3e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    if older:
        axes.legend(frameon=False, fontsize=9, loc="best")


def _curve(axes: Axes, curve: Sequence[Pass], colour: str, label: str) -> None:
    ks = [each.k for each in curve]
    means = [each.share.estimate for each in curve]
    lows, highs = [each.share.low for each in curve], [each.share.high for each in curve]
    if len(ks) > 1:
        axes.fill_between(ks, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axes.vlines(ks, lows, highs, color=colour, linewidth=1)
    axes.plot(ks, means, marker="o", markersize=4, color=colour, label=label)
    if label == "now":
        for k, mean in zip(ks, means, strict=True):
            # Curves rise, so there is room on the left above them.
            axes.annotate(
                f"{100 * mean:.1f}",
                (k, mean),
                (-5, 5),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                color=colour,
            )


def _transitions(axes: Axes, comparison: Comparison) -> None:
    changed = [each for each in comparison.transitions if each.old != each.new]
    total = sum(each.count for each in changed)
    _title(axes, f"Verdicts that changed: {total:,} of {comparison.matched:,}")
    if not changed:
        _nothing(axes, "none")
        return
    shown = changed[:_TRANSITIONS]
    _rows(axes, [f"{each.old} → {each.new}" for each in shown])
    colours = [_KINDS[kind_of(each.old, each.new)] for each in shown]
    axes.barh(range(len(shown)), [each.count for each in shown], height=0.6, color=colours)
    for place, each in enumerate(shown):
        axes.text(each.count, place, f" {each.count:,}", va="center", fontsize=9, color=_INK)
    axes.set_xlim(0, shown[0].count * 1.2)
    _no_scale(axes)
    if len(changed) > len(shown):
        axes.set_xlabel(f"and {len(changed) - len(shown)} rarer ones", fontsize=9, color=_INK)


def _quantiles(axes: Axes, found: Report) -> None:
    _title(axes, "Where the time went: p50, p90, p99 and the longest")
    names = {"wall_s": "on the worker", "cpu_s": "CPU in Lean", "queued_s": "in the queue"}
    if not found.times:
        _nothing(axes, "no times")
        return
    _rows(axes, [names[name] for name in found.times])
    # What took no time at all has no place on a logarithmic axis.
    least = CPU_EDGES_S[0]
    for place, times in enumerate(found.times.values()):
        points = [max(least, each) for each in (times.p50, times.p90, times.p99, times.max)]
        axes.plot(points, [place] * 4, color=_NEW, linewidth=1.2)
        axes.scatter(points, [place] * 4, s=(64, 44, 28, 14), color=_NEW, zorder=3)
    axes.set_xscale("log")
    low = max(least, min(times.p50 for times in found.times.values()))
    high = max(low, *(times.max for times in found.times.values()))
    axes.set_xlim(low / 4, high * 4)
    _time_axis(axes)


def _no_scale(axes: Axes) -> None:
    """For bars that have their values beside them."""
    axes.xaxis.set_major_locator(NullLocator())
    axes.spines["bottom"].set_visible(False)


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=_OLD)
    axes.set_axis_off()
