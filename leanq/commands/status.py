"""``leanq status``: one look at the queue, a look each second, or what the last hours were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from leanq.commands import options
from leanq.commands.common import queue_settings, until_signal
from leanq.commands.history import print_history, write_history
from leanq.errors import NotPermittedError, QueueError, UsageError
from leanq.fleet.shown import columns, counted, duration, plural, printable
from leanq.fleet.stats import (
    FleetStats,
    decisions_of,
    degraded_of,
    environments_of,
    fingerprints_of,
    fleet_stats_of,
    lean_of,
    unsized,
)
from leanq.queue.operator_queue import OperatorQueue, every_queue
from leanq.queue.results import merged
from leanq.queue.settings import Settings, without_password
from leanq.queue.shard import check_shape
from leanq.queue.wire import info_of

_EVERY_S = 1.0
# Rates are over so many looks: enough to be read, few enough to follow.
_LOOKS = 11
# The most workers in plain output of --watch, which no screen bounds.
_MOST_WORKERS = 10
_MOST_TENANTS = 5
_MOST_MEMORIES = 5
# The share of the server's memory at which LeanQRedisMemoryHigh begins, too.
_NEARLY_FULL = 0.85
_SHOWN_OF_WORKERS: Mapping[str, type] = {
    "slots": int,
    "started": float,
    "environments": list,
}


@click.command()
@options.queue
@click.option(
    "--since",
    "since_s",
    type=options.DURATION,
    metavar="DURATION",
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
    if watch:
        _watch(settings, as_json)
    elif since_s is not None and out is not None:
        write_history(settings, since_s, out)
    elif since_s is not None:
        print_history(settings, since_s, as_json)
    else:
        _once(settings, as_json)


def _once(settings: Settings, as_json: bool) -> None:
    record = _record_of(settings, asyncio.run(_look(settings)))
    click.echo(json.dumps(record, default=str) if as_json else "\n".join(_lines(record)))


async def _look(settings: Settings) -> FleetStats:
    """Looks once; raises UsageError if the fleet serves another number of shards."""
    async with every_queue(settings) as queues:
        await check_shape(queues[0].shard)
        return await _stats_of(queues)


async def _stats_of(queues: Sequence[OperatorQueue]) -> FleetStats:
    """Looks once, without the server's memory if this user may not ask for it."""
    try:
        return await fleet_stats_of(queues)
    except NotPermittedError:
        found = merged(await asyncio.gather(*(queue.status() for queue in queues)))
        return FleetStats(time.time(), found, environments_of(found))


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
        "dead": status.dead,
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
    yield from map(printable, _summary(record))
    for table in (_environment_table(record), _waiting_table(record), _worker_table(record)):
        if table:
            yield ""
            yield from map(printable, table)
    if not record["workers"]:
        yield ""
        yield "no worker is alive; start one with 'leanq worker'"


def _summary(record: dict[str, Any]) -> Iterator[str]:
    """Yields the queue as a whole, and the scaler's decisions."""
    yield f"queue       {record['url']}"
    waiting = sum(row["waiting"] for row in record["waiting"])
    waiting += sum(record["quarantined"].values())
    paused = sum(row["held"] for row in record["waiting"])
    yield f"waiting     {waiting:,}{f', of which {paused:,} are paused' if paused else ''}"
    yield f"running     {record['running']:,}"
    finished = sum(record["verdicts"].values())
    verdicts = counted(record["verdicts"])
    yield f"finished    {finished:,}{f': {verdicts}' if verdicts else ''}"
    if record["reasons"]:
        yield f"reasons     {counted(record['reasons'])}"
    yield from _cpu_lines(record)
    for name, since_s in sorted(record["paused"].items()):
        what, option = ("environment", "env") if name.startswith("e:") else ("tenant", "tenant")
        age = duration(time.time() - since_s)
        yield f"paused      {what} {name[2:]} for {age} (leanq resume --{option} {name[2:]})"
    for name, each in record["environments"].items():
        if len(each["fingerprints"]) > 1:
            offers = {found[:12]: count for found, count in each["fingerprints"].items()}
            yield (
                f"differs     {name} is not the same on all workers, nor are its verdicts: "
                f"{counted(offers)} (workers by fingerprint)"
            )
    for name, flood in record["floods"].items():
        yield f"floods      {flood['tenant']} has {flood['waiting']:,} of what waits in {name}"
    for row in record["workers"]:
        for name, why in row["degraded"].items():
            yield f"degraded    {name} on {row['worker']}: {why}"
    for name, count in record["quarantined"].items():
        text = "to run alone, since their workers died"
        yield f"quarantined {plural(count, 'request')} of {name}, {text}"
    share = record["memory_bytes"] / (record["memory_limit_bytes"] or math.inf)
    if share >= _NEARLY_FULL:
        yield f"memory      {share:.0%} of the server's maxmemory; a full server takes no requests"
    yield from _memory_lines(record)
    retries = {
        "requeued after an expired lease": record["reaped"],
        "returned by workers that stopped": record["released"],
        "stale results refused": record["fenced"],
    }
    if any(retries.values()):
        yield f"retries     {counted(retries)}"
    if record["dead"]:
        text = "that took down too many workers (leanq dead list)"
        yield f"dead        {plural(record['dead'], 'request')} {text}"
    shared = {
        "joined an identical run": record["coalesced"],
        "answered from remembered verdicts": record["remembered"],
    }
    if any(shared.values()):
        yield f"shared      {counted(shared)}"
    if record["prefixes"]:
        ways = {_WAYS.get(name, name): count for name, count in record["prefixes"].items()}
        yield f"contexts    of goals and steps: {counted(ways)}"
    if hits := record["warm_hits"]:
        yield (
            f"warm        {hits:,} of {plural(hits + record['warm_misses'], 'request')} went to a "
            "worker that had their header or state loaded"
        )
    for name, made in record["scaler"].items():
        age = duration(time.time() - made["at"])
        yield (
            f"scaler      {name}: {made['target']} workers wanted, {made['order']} before "
            f"({made['reason']}, {age} ago, {made['who']}): {made['text']}"
        )
    for title, text in (
        ("unsized", "which no scaler sizes"),
        ("unserved", "which no living worker offers"),
    ):
        if found := record[title]:
            count = plural(sum(found.values()), "request")
            yield f"{title:11} {count} of {', '.join(sorted(found))}, {text}"


def _memory_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yields the replay memories, and how much they have dropped."""
    found = sorted(record["memories"].items(), key=lambda item: (-item[1]["size_bytes"], item[0]))
    for name, row in found[:_MOST_MEMORIES]:
        dropped = f", {row['dropped']:,} dropped" if row["dropped"] else ""
        held = f"{plural(row['entries'], 'entry', 'entries')} in {row['size_bytes'] / 1e6:,.1f} MB"
        yield f"replay      {name}: {held}, {row['evicted']:,} evicted{dropped}"
    if len(found) > _MOST_MEMORIES:
        yield f"replay      and {len(found) - _MOST_MEMORIES} more memories (--json)"


def _cpu_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yields the uses of CPU time, the largest first."""
    for name, each in record["environments"].items():
        used = sorted(each["tenants_cpu_s"].items(), key=lambda item: (-item[1], item[0]))
        if used:
            tenants = [f"{tenant or 'others'} {duration(used_s)}" for tenant, used_s in used]
            more = f" and {len(used) - _MOST_TENANTS} more" if len(used) > _MOST_TENANTS else ""
            text = ", ".join(tenants[:_MOST_TENANTS])
            yield f"CPU time    {name}: {duration(each['cpu_s'])}, by tenant {text}{more}"
    if record["weights"]:
        weights = ", ".join(f"{name} {w:g}" for name, w in sorted(record["weights"].items()))
        yield f"weights     of CPU time: {weights}; other tenants 1"


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
        oldest = duration(each["oldest_s"]) if each["waiting"] > each["paused"] else "–"
        row = [
            name,
            f"{each['waiting']:,}",
            *(f"{n:,}" for n in (each["paused"],) if apart),
            oldest,
        ]
        if watched:
            rates = (each["submitted_per_s"], each["finished_per_s"])
            row += ("–" if rate is None else f"{rate:,.1f}" for rate in rates)
        slots = each["slots_busy"] + each["slots_idle"]
        row += (f"{count:,.0f}" for count in (each["running"], slots, each["workers"]))
        if not watched:
            found = sorted(each["fingerprints"]) or [str(each.get("fingerprint") or "–")]
            row += (lean_of(each) or "–", ", ".join(fingerprint[:12] for fingerprint in found))
        rows.append(row)
    if not rows:
        return []
    rates_of = ("IN/S", "OUT/S") if watched else ()
    paused = ("PAUSED",) if apart else ()
    what_it_is = () if watched else ("LEAN", "FINGERPRINT")
    titles = (
        "ENVIRONMENT",
        "WAITING",
        *paused,
        "OLDEST",
        *rates_of,
        "RUNNING",
        "SLOTS",
        "WORKERS",
    )
    return columns((*titles, *what_it_is), rows, left=("ENVIRONMENT", *what_it_is))


def _waiting_table(record: dict[str, Any]) -> list[str]:
    rows = []
    for row in record["waiting"]:
        oldest = duration(row["oldest_s"]) if row["held"] < row["waiting"] else "–"
        counts = (f"{row[what]:,}" for what in ("waiting", "held"))
        rows.append(
            (row["environment"], str(row["priority"]), *counts, oldest, f"{row['tenants']:,}")
        )
    titles = ("ENVIRONMENT", "PRIORITY", "WAITING", "PAUSED", "OLDEST", "TENANTS")
    return columns(titles, rows) if rows else []


def _worker_table(record: dict[str, Any], most: int | None = None) -> list[str]:
    rows = []
    for row in record["workers"][:most]:
        lease = duration(row["lease_s"]) if row["lease_s"] > 0 else "expired"
        age = duration(time.time() - row["started"]) if "started" in row else "–"
        serves = ", ".join(map(str, row.get("environments", []))) or "–"
        slots = str(row.get("slots", "?"))
        rows.append((row["worker"], f"{row['running']:,}", slots, lease, age, serves))
    titles = ("WORKER", "RUNNING", "SLOTS", "LEASE", "UP", "SERVES")
    return columns(titles, rows, left=("WORKER", "SERVES")) if rows else []


# --watch


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last successful look, and the trouble since; either may be missing."""

    record: dict[str, Any] | None
    trouble: str = ""


_Show = Callable[[_Seen], None]


def _watch(settings: Settings, as_json: bool) -> None:
    """Shows the queue until interrupted: in place on a terminal, look after look elsewhere."""
    if as_json:
        show = _json_lines(settings)
    elif sys.stdout.isatty() and not Console().is_dumb_terminal:
        show = _live()
    else:
        show = _blocks()
    with show as each:
        asyncio.run(until_signal(_look_again(settings, each)))


async def _look_again(settings: Settings, show: _Show) -> None:
    loop, rates = asyncio.get_running_loop(), _Rates()
    seen = _Seen(None)
    async with every_queue(settings) as queues:
        while True:
            start_s = loop.time()
            look_ = asyncio.create_task(_stats_of(queues))
            try:
                while not (await asyncio.wait({look_}, timeout=_EVERY_S))[0]:
                    late = f"no answer for {loop.time() - start_s:.0f} s"
                    show(_Seen(seen.record, late))
                rates.add(look_.result())
                seen = _Seen(_record_of(settings, look_.result(), rates))
            except QueueError as error:
                # The queue may come back.
                seen = _Seen(seen.record, str(error))
            finally:
                look_.cancel()
                await asyncio.gather(look_, return_exceptions=True)
            show(seen)
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


@contextlib.contextmanager
def _json_lines(settings: Settings) -> Iterator[_Show]:
    def show(seen: _Seen) -> None:
        record = seen.record
        if seen.trouble or not record:
            url = without_password(settings.url)
            record = {"at_s": time.time(), "url": url, "error": seen.trouble}
        click.echo(json.dumps(record, default=str))

    yield show


@contextlib.contextmanager
def _blocks() -> Iterator[_Show]:
    def show(seen: _Seen) -> None:
        click.echo("".join(f"{printable(line)}\n" for line, _ in _looked(seen)))

    yield show


def _worker_count(workers: list[dict[str, Any]]) -> str:
    expired = sum(row["lease_s"] <= 0 for row in workers)
    if not workers:
        return "no worker is alive; start one with 'leanq worker'"
    text = f"{plural(len(workers) - expired, 'worker')} alive"
    return text + (f", {plural(expired, 'expired lease')}" if expired else "")


@contextlib.contextmanager
def _live() -> Iterator[_Show]:
    console = Console()
    # On a screen of its own, the terminal may change its size.
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last: RenderableType = ""

        def show(seen: _Seen) -> None:
            nonlocal last
            last = _view(seen, console)
            live.update(last, refresh=True)

        yield show
    # The screen is gone; keep what it showed.
    console.print(last)


def _view(seen: _Seen, console: Console) -> RenderableType:
    lines = _looked(seen, console.height)
    return Group(
        *(Text(printable(line), style, no_wrap=True, overflow="ellipsis") for line, style in lines)
    )


def _looked(seen: _Seen, height: int | None = None) -> list[tuple[str, str]]:
    """Returns a look as lines with their styles, as many as fit a screen of this height."""
    rows = [(f"leanq       {time.strftime('%Y-%m-%d %H:%M:%S')}", "bold")]
    if seen.trouble:
        rows.append((f"error       {seen.trouble}", "bold red"))
    record = seen.record
    if record is None or (seen.trouble and height is None):
        return rows
    if seen.trouble:
        rows.append((f"the last look was {time.time() - record['at_s']:.0f} s ago", ""))
    names, workers = list(record["environments"]), record["workers"]
    most = max(1, height // 4) if height else len(names)
    hidden = {*names[most:]}
    kept = {name: made for name, made in record["scaler"].items() if name not in hidden}
    rows += ((line, _style(line)) for line in _summary(record | {"scaler": kept}))
    # A low screen has no room for empty lines.
    gap = [("", "")] if height is None or height >= 24 else []
    table = _environment_table(record, watched=True, most=most)
    rows += (*gap, *((line, "" if number else "dim") for number, line in enumerate(table)))
    if hidden:
        rows.append((f"and {len(hidden)} more", "dim"))
    rows += (*gap, (_worker_count(workers), "bold" if workers else "yellow"))
    # The rows below the titles.
    room = _MOST_WORKERS if height is None else height - len(rows) - 1
    if room > 0 and workers:
        titles, *table = _worker_table(record, room)
        rows.append((titles, "dim"))
        for line, row in zip(table, workers, strict=False):
            rows.append((line, "red" if row["lease_s"] <= 0 else "" if row["running"] else "dim"))
        if height is None and len(workers) > room:
            rows.append((f"and {len(workers) - room:,} more", "dim"))
    return rows


def _style(line: str) -> str:
    return (
        "yellow" if line.startswith(("paused", "retries", "dead", "quarantined", "differs")) else ""
    )
