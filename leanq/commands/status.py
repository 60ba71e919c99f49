"""``leanq status``: one look at the queue, a look each second, or what the last hours were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from leanq.commands import options
from leanq.commands.common import beside, on_queues, queue_settings, until_signal
from leanq.commands.history import print_history, used_by_tenant, write_history
from leanq.errors import NotPermittedError, QueueError, RefusedError, UsageError
from leanq.fleet.shown import counted, duration, plural, printable, table
from leanq.fleet.stats import (
    NEARLY_FULL,
    FleetStats,
    decisions_of,
    degraded_of,
    environments_of,
    fingerprints_of,
    fleet_stats_of,
    lean_of,
    options_of,
    unsized,
)
from leanq.queue.operator_queue import OperatorQueue, every_queue
from leanq.queue.results import merged
from leanq.queue.settings import Settings, without_password
from leanq.queue.shard import check_shape, refusal
from leanq.queue.wire import info_of

_EVERY_S = 1.0
# Rates are over so many looks: enough to be read, few enough to follow.
_LOOKS = 11
# The most workers in plain output of --watch, which no screen bounds.
_MOST_WORKERS = 10
_MOST_MEMORIES = 5
_NO_WORKER = "no worker is alive; start one with 'leanq worker'"
# Titles of a look that stand out.
_TROUBLE = ("others", "lost", "paused", "retries", "dead", "quarantined", "differs", "refused")
_SHOWN_OF_WORKERS: Mapping[str, type] = {
    "slots": int,
    "started": float,
    "environments": list,
}

_Record = dict[str, Any]


@click.command()
@options.queue
@click.option(
    "--since",
    "since_s",
    type=options.DURATION,
    help="Show the last 30m, 24h or 1d, by periods.",
)
@click.option(
    "--out",
    metavar="FILE",
    help="With --since: write the history to a Parquet file, by the minute.",
)
@click.option("--watch", is_flag=True, help="Look once a second until interrupted.")
def status(
    url: str | None, as_json: bool, since_s: float | None, out: str | None, watch: bool
) -> None:
    """Show what waits, what runs, what ended, and the workers."""
    if out is not None and since_s is None:
        raise UsageError("--out writes what --since shows; give both, such as --since 24h")
    if watch and since_s is not None:
        raise UsageError("give either --watch or --since")
    settings = queue_settings(url)

    async def look(queues: Sequence[OperatorQueue]) -> FleetStats:
        await check_shape(queues[0].shard)
        return await _stats_of(queues)

    if watch:
        asyncio.run(until_signal(_watch(settings, as_json)))
    elif since_s is None:
        record = _record_of(settings, on_queues(url, look))
        click.echo(json.dumps(record, default=str) if as_json else "\n".join(_lines(record)))
    elif out is None:
        print_history(settings, since_s, as_json)
    else:
        write_history(settings, since_s, out)


async def _stats_of(queues: Sequence[OperatorQueue]) -> FleetStats:
    """Looks once, without the server's memory if that may not be asked for."""
    refused = await refusal(queues[0].shard)
    try:
        return replace(await fleet_stats_of(queues), refused=refused)
    except (NotPermittedError, RefusedError):
        found = merged(await asyncio.gather(*(queue.status() for queue in queues)))
        return FleetStats(time.time(), found, environments_of(found), refused=refused)


# The JSON of a look


def _record_of(settings: Settings, seen: FleetStats, rates: _Rates | None = None) -> dict[str, Any]:
    """Returns what ``leanq status --json`` prints, with rates if there were looks before."""
    status = seen.status
    counters = status.counters
    return {
        "at_s": seen.at_s,
        "url": without_password(settings.url),
        "environments": _environments(seen, rates),
        "waiting": [
            # In a paused environment all is held back, whatever the tenant.
            asdict(row) | ({"held": row.waiting} if f"e:{row.environment}" in status.paused else {})
            for row in status.priorities
        ],
        "quarantined": dict(status.quarantined),
        "floods": {
            name: {"tenant": flood[0], "waiting": flood[1]}
            for name, each in seen.environments.items()
            if (flood := each.floods())
        },
        "paused": dict(status.paused),
        "running": sum(row.held for row in status.workers),
        "refused": seen.refused,
        "dead": status.dead,
        "others": [row._asdict() | {"text": row.text} for row in status.others],
        "lost": max(0, status.unaccounted),
        "memory_bytes": seen.memory_bytes,
        "memory_limit_bytes": seen.memory_limit_bytes,
        **{
            name: counters.get(name, 0)
            for name in (
                *("submitted", "settled", "coalesced", "remembered", "reaped", "released"),
                *("fenced", "warm_hits", "warm_misses"),
            )
        },
        "prefixes": _beginning(counters, "way:"),
        "verdicts": _beginning(counters, "verdict:"),
        "reasons": _beginning(counters, "reason:"),
        "weights": dict(status.weights),
        "memories": {name: asdict(row) for name, row in sorted(status.memories.items())},
        "scaler": {name: asdict(made) for name, made in decisions_of(status).items()},
        **_in_no_hands(seen),
        "workers": [
            {
                "worker": row.worker,
                "running": row.held,
                "lease_s": round(row.lease_s, 1),
                "degraded": degraded_of(info_of(row.info)),
                "fingerprints": fingerprints_of(info_of(row.info)),
                **{
                    name: value
                    for name, value in info_of(row.info).items()
                    if isinstance(value, _SHOWN_OF_WORKERS.get(name, ()))
                },
            }
            for row in sorted(status.workers, key=lambda row: (-row.held, row.worker))
        ],
    }


def _environments(seen: FleetStats, rates: _Rates | None) -> dict[str, dict[str, Any]]:
    """Returns what each environment is and does, the busiest first."""
    found = {}
    by_size = sorted(
        seen.environments.items(), key=lambda item: (-(item[1].waiting + item[1].running), item[0])
    )
    for name, stats in by_size:
        came, ended = (rates and rates.of(name)) or (None, None)
        found[name] = {
            **info_of(seen.status.environments.get(name, b"")),
            "waiting": stats.waiting + stats.quarantined,
            "paused": stats.held,
            "oldest_s": round(stats.oldest_s, 1),
            "submitted_per_s": came,
            "finished_per_s": ended,
            "cpu_s": round(stats.cpu_s, 1),
            "tenants_cpu_s": {
                tenant: round(used_s, 1) for tenant, used_s in stats.tenants_cpu_s.items()
            },
            "running": stats.running,
            "slots_busy": stats.busy,
            "slots_idle": stats.slots - stats.busy,
            "workers": stats.workers,
            "fingerprints": dict(stats.fingerprints),
        }
    return found


def _in_no_hands(seen: FleetStats) -> dict[str, dict[str, int]]:
    """Returns the requests that nothing serves: if there are scalers, those in environments that
    none sizes, else those in environments that no living worker offers."""
    found = {name: count for name, count in unsized(seen, ()).items() if count}
    if decisions_of(seen.status):
        return {"unsized": found, "unserved": {}}
    served = {name for name, stats in seen.environments.items() if stats.workers}
    return {"unsized": {}, "unserved": {n: found[n] for n in found if n not in served}}


def _beginning(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Returns the counters with such a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): n
        for name, n in sorted(counters.items())
        if name.startswith(prefix)
    }


# A look for people


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield from (printable(f"{title:12}{text}") for title, text in _summary(record))
    for rows in (_environment_table(record), _waiting_table(record), _worker_table(record)):
        if rows:
            yield ""
            yield from map(printable, rows)
    if not record["workers"]:
        yield ""
        yield _NO_WORKER


def _summary(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the queue as a whole and the scaler's decisions: titles with their texts."""
    yield "queue", record["url"]
    waiting = sum(row["waiting"] for row in record["waiting"])
    waiting += sum(record["quarantined"].values())
    paused = sum(row["held"] for row in record["waiting"])
    yield "waiting", f"{waiting:,}{f', of which {paused:,} are paused' if paused else ''}"
    yield "running", f"{record['running']:,}"
    finished = sum(record["verdicts"].values())
    yield "finished", ": ".join(filter(None, (f"{finished:,}", counted(record["verdicts"]))))
    if record["reasons"]:
        yield "reasons", counted(record["reasons"])
    for name, each in record["environments"].items():
        if each["tenants_cpu_s"]:
            used = used_by_tenant(each["tenants_cpu_s"])
            yield "CPU time", f"{name}: {duration(each['cpu_s'])}, by tenant {used}"
    if record["weights"]:
        weights = ", ".join(f"{name} {w:g}" for name, w in sorted(record["weights"].items()))
        yield "weights", f"of CPU time: {weights}; other tenants 1"
    for name, since_s in sorted(record["paused"].items()):
        what, option = ("environment", "env") if name.startswith("e:") else ("tenant", "tenant")
        age = duration(time.time() - since_s)
        yield "paused", f"{what} {name[2:]} for {age} (leanq resume --{option} {name[2:]})"
    for name, each in record["environments"].items():
        if options := options_of(each):
            yield "options", f"{name}: {', '.join(options)}"
        if len(each["fingerprints"]) > 1:
            offers = counted({found[:12]: count for found, count in each["fingerprints"].items()})
            text = "is not the same on all workers, nor are its verdicts"
            yield "differs", f"{name} {text}: {offers} (workers by fingerprint)"
    for name, flood in record["floods"].items():
        yield "floods", f"{flood['tenant']} has {flood['waiting']:,} of what waits in {name}"
    for row in record["workers"]:
        for name, why in row["degraded"].items():
            yield "degraded", f"{name} on {row['worker']}: {why}"
    for row in record["others"]:
        yield "others", row["text"]
    if record["lost"]:
        text = "neither wait nor run nor have ended; their clients send them again"
        yield "lost", f"{plural(record['lost'], 'request')} so far {text}"
    if record["refused"]:
        yield "refused", f"a worker that would join: {record['refused']}"
    for name, count in record["quarantined"].items():
        text = "to run alone, since their workers died"
        yield "quarantined", f"{plural(count, 'request')} of {name}, {text}"
    share = record["memory_bytes"] / (record["memory_limit_bytes"] or math.inf)
    if share > NEARLY_FULL:
        yield "memory", f"{share:.0%} of the server's maxmemory; a full server takes no requests"
    yield from (("replay", text) for text in _memories(record["memories"]))
    sums = {
        "retries": {
            "requeued after an expired lease": record["reaped"],
            "returned by workers that stopped": record["released"],
            "stale results refused": record["fenced"],
        },
        "shared": {
            "joined an identical run": record["coalesced"],
            "answered from remembered verdicts": record["remembered"],
        },
    }
    yield from ((title, counted(counts)) for title, counts in sums.items() if any(counts.values()))
    if record["dead"]:
        text = "that took down too many workers (leanq dead list)"
        yield "dead", f"{plural(record['dead'], 'request')} {text}"
    if record["prefixes"]:
        ways = {_WAYS.get(name, name): count for name, count in record["prefixes"].items()}
        yield "contexts", f"of goals and steps: {counted(ways)}"
    if hits := record["warm_hits"]:
        text = "went to a worker that had their header or state loaded"
        yield "warm", f"{hits:,} of {plural(hits + record['warm_misses'], 'request')} {text}"
    for name, made in record["scaler"].items():
        wanted = f"{made['target']} workers wanted, {made['order']} before"
        why = f"{made['reason']}, {duration(time.time() - made['at'])} ago, {made['who']}"
        yield "scaler", f"{name}: {wanted} ({why}): {made['text']}"
    in_no_hands = {"unsized": "which no scaler sizes", "unserved": "which no living worker offers"}
    for title, text in in_no_hands.items():
        if found := record[title]:
            count = plural(sum(found.values()), "request")
            yield title, f"{count} of {', '.join(sorted(found))}, {text}"


def _memories(memories: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields the replay memories, and how much they have dropped."""
    found = sorted(memories.items(), key=lambda item: (-item[1]["size_bytes"], item[0]))
    for name, row in found[:_MOST_MEMORIES]:
        dropped = f", {row['dropped']:,} dropped" if row["dropped"] else ""
        held = f"{plural(row['entries'], 'entry', 'entries')} in {row['size_bytes'] / 1e6:,.1f} MB"
        yield f"{name}: {held}, {row['evicted']:,} evicted{dropped}"
    if len(found) > _MOST_MEMORIES:
        yield f"and {len(found) - _MOST_MEMORIES} more memories (--json)"


# How Lean got the context of a goal: the part of its text before it.
_WAYS = {
    "warm": "loaded from this worker's disk",
    "cold": "loaded from Redis",
    "replayed": "elaborated",
    "failed": "failed to load",
}


def _environment_table(
    record: dict[str, Any], *, watched: bool = False, most: int | None = None
) -> list[str]:
    """Returns a table of what waits and runs by environment. ``watched`` adds rates, which take two
    looks, and what is paused, which otherwise has a table of its own."""
    rows = []
    apart = watched and any(each["paused"] for each in record["environments"].values())
    for name, each in list(record["environments"].items())[:most]:
        row = {"ENVIRONMENT": name, "WAITING": f"{each['waiting']:,}"}
        if apart:
            row["PAUSED"] = f"{each['paused']:,}"
        row["OLDEST"] = duration(each["oldest_s"]) if each["waiting"] > each["paused"] else "–"
        if watched:
            for title, rate in (("IN/S", "submitted_per_s"), ("OUT/S", "finished_per_s")):
                row[title] = "–" if each[rate] is None else f"{each[rate]:,.1f}"
        row["RUNNING"] = f"{each['running']:,.0f}"
        row["SLOTS"] = f"{each['slots_busy'] + each['slots_idle']:,.0f}"
        row["WORKERS"] = f"{each['workers']:,.0f}"
        if not watched:
            found = sorted(each["fingerprints"]) or [str(each.get("fingerprint") or "–")]
            row["LEAN"] = lean_of(each) or "–"
            row["FINGERPRINT"] = ", ".join(fingerprint[:12] for fingerprint in found)
        rows.append(row)
    return table(rows, left=("ENVIRONMENT", "LEAN", "FINGERPRINT"))


def _waiting_table(record: dict[str, Any]) -> list[str]:
    rows = [
        {
            "ENVIRONMENT": row["environment"],
            "PRIORITY": str(row["priority"]),
            "WAITING": f"{row['waiting']:,}",
            "PAUSED": f"{row['held']:,}",
            "OLDEST": duration(row["oldest_s"]) if row["held"] < row["waiting"] else "–",
            "TENANTS": f"{row['tenants']:,}",
        }
        for row in record["waiting"]
    ]
    return table(rows)


def _worker_table(record: dict[str, Any], most: int | None = None) -> list[str]:
    rows = [
        {
            "WORKER": row["worker"],
            "RUNNING": f"{row['running']:,}",
            "SLOTS": str(row.get("slots", "?")),
            "LEASE": duration(row["lease_s"]) if row["lease_s"] > 0 else "expired",
            "UP": duration(time.time() - row["started"]) if "started" in row else "–",
            "SERVES": ", ".join(map(str, row.get("environments", []))) or "–",
        }
        for row in record["workers"][:most]
    ]
    return table(rows, left=("WORKER", "SERVES"))


# --watch


async def _watch(settings: Settings, as_json: bool) -> None:
    """Shows the queue until cancelled: in place on a terminal, look after look elsewhere."""
    console = Console()
    if as_json or not sys.stdout.isatty() or console.is_dumb_terminal:
        async for record, trouble in _looks(settings):
            if as_json:
                failed = {"at_s": time.time(), "url": without_password(settings.url)}
                shown = failed | {"error": trouble} if trouble else record
                click.echo(json.dumps(shown, default=str))
            else:
                lines = _looked(record, trouble)
                click.echo("".join(f"{printable(line)}\n" for line, _ in lines))
        return
    last: RenderableType = ""
    # On a screen of its own, the terminal may change its size.
    live = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(asyncio.CancelledError), live:
        async for record, trouble in _looks(settings):
            last = _view(record, trouble, console)
            live.update(last, refresh=True)
    # The screen is gone; keep what it showed.
    console.print(last)


async def _looks(settings: Settings) -> AsyncGenerator[tuple[_Record | None, str], None]:
    """Yields the last successful look, if there was one, and the trouble since, each second."""
    loop, rates = asyncio.get_running_loop(), _Rates()
    record: _Record | None = None
    async with every_queue(settings) as queues:
        while True:
            start_s, trouble = loop.time(), ""
            async with beside(_stats_of(queues)) as look_:
                try:
                    while not (await asyncio.wait({look_}, timeout=_EVERY_S))[0]:
                        yield record, f"no answer for {loop.time() - start_s:.0f} s"
                    rates.add(look_.result())
                    record = _record_of(settings, look_.result(), rates)
                except QueueError as error:
                    # The queue may come back.
                    trouble = str(error)
            yield record, trouble
            await asyncio.sleep(max(0.0, start_s + _EVERY_S - loop.time()))


class _Rates:
    """Counts the requests that came and ended per second, by environment, over the last looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, tuple[int, int]]]] = deque(maxlen=_LOOKS)

    def add(self, seen: FleetStats) -> None:
        counts = {
            name: (stats.submitted, stats.finished.total())
            for name, stats in seen.environments.items()
        }
        # A server counts from less after a restart or a failover.
        if self._looks and any(
            counts.get(name, (0, 0))[n] < before[n]
            for name, before in self._looks[-1][1].items()
            for n in (0, 1)
        ):
            self._looks.clear()
        self._looks.append((seen.at_s, counts))

    def of(self, name: str) -> tuple[float, float] | None:
        """Returns both rates per second; None before the second look."""
        (start_s, first), (end_s, last) = self._looks[0], self._looks[-1]
        if end_s <= start_s:
            return None
        came, ended = (last[name][n] - first.get(name, (0, 0))[n] for n in (0, 1))
        return round(came / (end_s - start_s), 2), round(ended / (end_s - start_s), 2)


def _view(record: _Record | None, trouble: str, console: Console) -> RenderableType:
    lines = _looked(record, trouble, console.height)
    return Group(
        *(Text(printable(line), style, no_wrap=True, overflow="ellipsis") for line, style in lines)
    )


def _looked(
    record: _Record | None, trouble: str, height: int | None = None
) -> list[tuple[str, str]]:
    """Returns a look as lines with their styles, as many as fit a screen of this height."""
    rows = [(f"leanq       {time.strftime('%Y-%m-%d %H:%M:%S')}", "bold")]
    if trouble:
        rows.append((f"error       {trouble}", "bold red"))
    if record is None or (trouble and height is None):
        return rows
    if trouble:
        rows.append((f"the last look was {time.time() - record['at_s']:.0f} s ago", ""))
    names, workers = list(record["environments"]), record["workers"]
    most = max(1, height // 4) if height else len(names)
    hidden = {*names[most:]}
    kept = {name: made for name, made in record["scaler"].items() if name not in hidden}
    for title, text in _summary(record | {"scaler": kept}):
        rows.append((f"{title:12}{text}", "yellow" if title in _TROUBLE else ""))
    # A low screen has no room for empty lines.
    gap = [("", "")] if height is None or height >= 24 else []
    environments = _environment_table(record, watched=True, most=most)
    rows += (*gap, *((line, "" if number else "dim") for number, line in enumerate(environments)))
    if hidden:
        rows.append((f"and {len(hidden)} more", "dim"))
    expired = sum(row["lease_s"] <= 0 for row in workers)
    alive = f"{plural(len(workers) - expired, 'worker')} alive" if workers else _NO_WORKER
    text = alive + (f", {plural(expired, 'expired lease')}" if expired else "")
    rows += (*gap, (text, "bold" if workers else "yellow"))
    # The rows below the titles.
    room = _MOST_WORKERS if height is None else height - len(rows) - 1
    if room > 0 and workers:
        titles, *lines = _worker_table(record, room)
        rows.append((titles, "dim"))
        for line, row in zip(lines, workers, strict=False):
            rows.append((line, "red" if row["lease_s"] <= 0 else "" if row["running"] else "dim"))
        if height is None and len(workers) > room:
            rows.append((f"and {len(workers) - room:,} more", "dim"))
    return rows
