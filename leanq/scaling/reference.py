"""The reference law."""

from __future__ import annotations

import math
import statistics

from .values import Decision, Memory, ScaleSettings, Stats

_MINUTE_S = 60.0


def by_reference(stats: Stats, settings: ScaleSettings, memory: Memory) -> Decision:
    """What the law wants, without the settings' bounds; the memory has these statistics already."""
    first = memory.since(_MINUTE_S)
    finished = stats.finished - first.finished
    span_s = stats.time_s - first.time_s
    minute = [s.ready for s in memory.samples if s.time_s >= first.time_s]
    rate = finished * _MINUTE_S / span_s if span_s else 0.0
    workers = statistics.fmean(minute)
    terms = {"queued": float(stats.queued), "finished_per_minute": rate, "workers": workers}
    if not stats.queued or stats.queued < rate:
        text = f"{stats.queued} wait and {rate:.0f} a minute are done: CPU decides above 1"
        return Decision(1, "autoscaler", text, terms, memory)
    if not rate or not workers:
        text = f"{stats.queued} wait and nothing is known of how fast they are done: held"
        return Decision(max(1, stats.order), "undefined", text, terms, memory)
    wanted = (rate + stats.queued / settings.clear_min) / (rate / workers)
    text = (
        f"{stats.queued} wait and {rate:.0f} a minute are done by {workers:.1f} workers: "
        f"{wanted:.1f} clear them in {settings.clear_min:g} minutes"
    )
    return Decision(math.ceil(wanted), "backlog", text, terms | {"wanted": wanted}, memory)
