"""The parts of the overview for a viewer, as plain values for the templates.

A viewer sees its own environments and its own tenant only, unless it sees the fleet.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from leanq.fleet.history import periods
from leanq.fleet.shown import duration
from leanq.fleet.stats import (
    NEARLY_FULL,
    EnvironmentStats,
    Times,
    degraded_of,
    lean_of,
    unsized,
)
from leanq.gateway.page.looks import DAY_S, SHOWN, Look, Totals
from leanq.gateway.page.viewers import Viewer
from leanq.gateway.recent import RecentRequests
from leanq.queue.metrics import BUCKETS_S
from leanq.queue.requests import LEAN_VERDICTS, Verdict
from leanq.queue.results import DeadLetter
from leanq.queue.wire import info_of

_CHART_PERIOD_S = 900
_WORKERS_SHOWN = 40
_RECENT_SHOWN = 8

VERDICTS: tuple[str, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Overview:
    look: Look
    recent: RecentRequests


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """Returns the seconds that this share of all requests does not exceed; None without requests.

    It interpolates between the edges of the bucket.
    """
    total = sum(counts)
    if not total:
        return None
    left = share * total
    lower = 0.0
    for edge, count in zip(BUCKETS_S, counts, strict=False):
        if count and left <= count:
            return lower + (edge - lower) * left / count
        left -= count
        lower = edge
    return lower


def _since(
    overview: Overview, viewer: Viewer, before: Totals
) -> tuple[float, dict[str, EnvironmentStats]]:
    """Returns what was submitted and finished in each environment since then, how long that took,
    and in how many seconds all of it happened."""
    at_s, totals = before
    found = {}
    for name, stats in _environments(overview, viewer):
        old = totals.get(name, EnvironmentStats())
        pairs = zip(stats.took.counts, old.took.counts, strict=True)
        found[name] = EnvironmentStats(
            submitted=max(0, stats.submitted - old.submitted),
            finished=stats.finished - old.finished,
            took=Times([max(0, now - then) for now, then in pairs]),
        )
    return overview.look.stats.at_s - at_s, found


def _per_s(count: int, span_s: float) -> float | None:
    # A rate needs an earlier look to compare with.
    return count / span_s if span_s >= 1 else None


def _listed(rows: Sequence[Any], most: int = SHOWN) -> dict[str, Any]:
    return {"rows": rows[:most], "more": max(0, len(rows) - most)}


def _environments(overview: Overview, viewer: Viewer) -> list[tuple[str, EnvironmentStats]]:
    found = overview.look.stats.environments.items()
    visible = [(name, stats) for name, stats in found if viewer.sees_environment(name)]
    return sorted(visible, key=lambda item: (-(item[1].waiting + item[1].running), item[0]))


def summary(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns the fleet in a row of figures, and warnings for operators."""
    look = overview.look
    environments = [stats for _, stats in _environments(overview, viewer)]
    span_s, lately = _since(overview, viewer, look.five_minutes_ago)
    rate_s, minute = _since(overview, viewer, look.minute_ago)
    ends = sum((each.finished for each in lately.values()), Counter[str]())
    took = [*map(sum, zip(*(each.took.counts for each in lately.values()), strict=True))]
    judged = sum(ends[verdict] for verdict in LEAN_VERDICTS)
    return {
        "waiting": sum(each.waiting + each.quarantined for each in environments),
        "held": sum(each.held for each in environments),
        "oldest_s": max((each.oldest_s for each in environments if each.due), default=None),
        "running": round(sum(each.running for each in environments)),
        "slots": round(sum(each.slots for each in environments)),
        "busy": round(sum(each.busy for each in environments)),
        "workers": round(sum(each.workers for each in environments)),
        "in_per_s": _per_s(sum(each.submitted for each in minute.values()), rate_s),
        "out_per_s": _per_s(sum(each.finished.total() for each in minute.values()), rate_s),
        "accepted": ends["accepted"] / judged if judged else None,
        "judged": judged,
        # Its client asked for a withdrawn request to end.
        "failed": ends.total() - judged - ends["cancelled"],
        "span_s": span_s,
        "p50_s": quantile_s(took, 0.5),
        "p99_s": quantile_s(took, 0.99),
        "dead": len(_dead(overview, viewer)),
        "warnings": list(_warnings(overview, viewer)),
    }


def _warnings(overview: Overview, viewer: Viewer) -> Iterator[tuple[str, str]]:
    """Returns the warnings: each an urgency and a sentence."""
    look = overview.look
    status = look.stats.status
    environments = dict(_environments(overview, viewer))
    waiting = sum(each.due for each in environments.values())
    if not any(each.workers for each in environments.values()):
        yield "bad" if waiting else "note", "No worker is alive; start one with “leanq worker”."
    else:
        for name, count in unsized(look.stats, ()).items():
            served = environments.get(name)
            if count and served is not None and not served.workers:
                yield "bad", f"{count:,} requests wait in {name}, which no living worker offers."
    for name, since_s in sorted(status.paused.items()):
        kind, _, what = name.partition(":")
        if kind == "e" and viewer.sees_environment(what):
            yield "note", f"The environment {what} is paused for {_ago(since_s)}."
        elif kind == "t" and viewer.sees_tenant(what):
            yield "note", f"The tenant {what} is paused for {_ago(since_s)}."
    for name, each in environments.items():
        if len(each.fingerprints) > 1:
            yield (
                "bad",
                f"{name} is not the same on all workers, and so its verdicts may differ: "
                f"{len(each.fingerprints)} fingerprints.",
            )
        if (flood := each.floods()) and viewer.sees_tenant(flood[0]):
            yield (
                "note",
                f"{flood[0]} has {flood[1]:,} of the {each.due:,} requests that wait in {name}.",
            )
    if viewer.sees_fleet:
        for row in status.workers:
            for name, why in degraded_of(info_of(row.info)).items():
                yield "note", f"{name} is slower than it should be on {row.worker}: {why}"
    for name, count in status.quarantined.items():
        if viewer.sees_environment(name):
            yield "note", f"{count:,} requests of {name} are quarantined: their workers died."
    stats = look.stats
    share = stats.memory_bytes / (stats.memory_limit_bytes or math.inf)
    if share > NEARLY_FULL:
        yield "bad", f"Redis uses {share:.0%} of its memory; a full one refuses new requests."


def _ago(since_s: float) -> str:
    return duration(time.time() - since_s)


def history(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns the last 24 hours by quarters of an hour, even if all workers are gone."""
    found = periods(
        overview.look.notes,
        DAY_S,
        length_s=_CHART_PERIOD_S,
        environments=viewer.environments or None,
    )
    rows = []
    for period in found:
        ends = Counter(period.finished)
        ended, judged = ends.total(), sum(ends[verdict] for verdict in LEAN_VERDICTS)
        rows.append(
            {
                "period": period,
                "accepted": ends["accepted"],
                "refused": judged - ends["accepted"],
                "unknown": ended - judged - ends["cancelled"],
                "wait_s": period.waited_s / ended if ended else None,
                "run_s": period.ran_s / ended if ended else None,
                "p50_s": quantile_s(period.took, 0.5),
                "p99_s": quantile_s(period.took, 0.99),
                "workers": period.workers if viewer.sees_fleet else None,
            }
        )
    return {"rows": rows, "length_s": _CHART_PERIOD_S, "trouble": _trouble(overview, "history")}


def verdicts(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns how requests ended, and why: in the last minutes, in a day, ever."""
    span_s, lately = _since(overview, viewer, overview.look.five_minutes_ago)
    now, day, ever, reasons = (Counter[str]() for _ in range(4))
    for each in lately.values():
        now.update(each.finished)
    for period in periods(overview.look.notes, DAY_S, environments=viewer.environments or None):
        day.update(period.finished)
    for _, stats in _environments(overview, viewer):
        ever.update(stats.finished)
        reasons.update(stats.reasons)
    most = max(day.values(), default=0) or 1
    rows = [
        {
            "verdict": verdict,
            "now": now[verdict],
            "day": day[verdict],
            "ever": ever[verdict],
            "share": round(100 * day[verdict] / most),
        }
        for verdict in (*VERDICTS, *sorted(ever.keys() - {*VERDICTS}))
        if ever[verdict]
    ]
    return {
        "rows": rows,
        "reasons": reasons.most_common(12),
        "span_s": span_s,
    }


def environments(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns for each environment what it is, what waits and runs there, and how fast."""
    status = overview.look.stats.status
    span_s, lately = _since(overview, viewer, overview.look.five_minutes_ago)
    rate_s, minute = _since(overview, viewer, overview.look.minute_ago)
    rows = []
    for name, stats in _environments(overview, viewer):
        about = info_of(status.environments.get(name, b""))
        took = lately[name].took.counts
        rows.append(
            {
                "name": name,
                "stats": stats,
                "lean": lean_of(about),
                "fingerprints": sorted(stats.fingerprints) or [str(about.get("fingerprint") or "")],
                "paused": f"e:{name}" in status.paused,
                "in_per_s": _per_s(minute[name].submitted, rate_s),
                "out_per_s": _per_s(minute[name].finished.total(), rate_s),
                "p50_s": quantile_s(took, 0.5),
                "p99_s": quantile_s(took, 0.99),
            }
        )
    return {"rows": rows, "operates": viewer.operates, "span_s": span_s}


def workers(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns the workers, busiest first, with the environments that the viewer may know."""
    rows: list[dict[str, Any]] = []
    for row in overview.look.stats.status.workers:
        info = info_of(row.info)
        offered = info.get("environments")
        serves = [str(name) for name in offered] if isinstance(offered, list) else []
        shown = [name for name in serves if viewer.sees_environment(name)]
        if not shown and viewer.environments:
            continue
        slots, started = info.get("slots"), info.get("started")
        rows.append(
            {
                "name": row.worker,
                "running": row.held,
                "slots": slots if isinstance(slots, int) else None,
                "lease_s": row.lease_s,
                "up_s": time.time() - started if isinstance(started, int | float) else None,
                "serves": shown,
                "degraded": sorted(degraded_of(info)),
            }
        )
    rows.sort(key=lambda row: (row["lease_s"] > 0, -row["running"], row["name"]))
    return _listed(rows, _WORKERS_SHOWN)


def tenants(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns the tenants: their use in a day, their weights, and who is paused."""
    status = overview.look.stats.status
    used = Counter[str]()
    for period in periods(overview.look.notes, DAY_S, environments=viewer.environments or None):
        used.update(period.tenants_cpu_s)
    paused = {name[2:]: at_s for name, at_s in status.paused.items() if name.startswith("t:")}
    total_s = used.total() or 1.0
    names = {*used, *status.weights, *paused, viewer.tenant}
    rows = [
        {
            "name": name,
            "cpu_s": used[name],
            "share": used[name] / total_s if viewer.sees_fleet else None,
            "weight": status.weights.get(name),
            "paused_s": time.time() - paused[name] if name in paused else None,
        }
        for name in sorted(names, key=lambda name: (-used[name], name))
        if viewer.sees_tenant(name)
    ]
    return {**_listed(rows), "operates": viewer.operates}


def requests(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    """Returns the longest running requests, the suspect ones, and the latest that ended here."""
    look = overview.look
    running = [each for each in look.running if viewer.sees(each.tenant, each.environment)]
    suspect = [each for each in look.quarantined if viewer.sees(each.tenant, each.environment)]
    suspect += [each for each in running if each.attempts]
    recent = [
        (kept, ended)
        for kept in overview.recent.all(None if viewer.operates else viewer.tenant)
        if (ended := kept.ended) and viewer.sees_environment(kept.submission.environment)
    ]
    return {
        "running": running[:_RECENT_SHOWN],
        "suspect": suspect[:SHOWN],
        "latest": recent[-_RECENT_SHOWN:][::-1],
        "slowest": sorted(recent, key=lambda each: -each[1].wall_s)[:_RECENT_SHOWN],
        "trouble": _trouble(overview, "requests"),
    }


def _dead(overview: Overview, viewer: Viewer) -> list[DeadLetter]:
    asked = ((letter, letter.submission) for letter in overview.look.dead)
    return [letter for letter, of in asked if viewer.sees(of.tenant, of.environment)]


def dead(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    return {**_listed(_dead(overview, viewer)), "trouble": _trouble(overview, "dead")}


def scaler(overview: Overview, viewer: Viewer) -> dict[str, Any]:
    found = sorted(overview.look.decisions.items())
    return {"rows": [each for each in found if viewer.sees_environment(each[0])]}


def _trouble(overview: Overview, part: str) -> str:
    return overview.look.troubles.get(part, "")


Section = Callable[[Overview, Viewer], dict[str, Any]]

SECTIONS: dict[str, Section] = {
    "summary": summary,
    "history": history,
    "environments": environments,
    "verdicts": verdicts,
    "workers": workers,
    "tenants": tenants,
    "requests": requests,
    "dead": dead,
    "scaler": scaler,
}
"""By name; a section's template and its server-sent event have the same name."""
