"""``leanq status``: one look at the queue, a look each second, or what the last hours were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leanq.commands import options
from leanq.commands.common import queue_settings, until_signal
from leanq.errors import QueueError, UsageError
from leanq.fleet.history import history
from leanq.fleet.stats import FleetStats, decisions_of, fleet_stats_of, info_of
from leanq.queue.queue import every_shard, look
from leanq.queue.results import Status
from leanq.queue.settings import Settings, without_password

_EVERY_S = 1.0
# Rates are over so many looks: enough to be read, few enough to follow.
_LOOKS = 11
# Of the workers in plain output, which no screen bounds.
_MOST_WORKERS = 10


@click.command()
@options.queue
@click.option(
    "--since",
    "since_s",
    type=options.DURATION,
    metavar="DURATION",
    help="What happened in the last 30m, 24h or 1d, by periods.",
)
@click.option("--watch", is_flag=True, help="Look once a second until interrupted.")
def status(url: str | None, as_json: bool, since_s: float | None, watch: bool) -> None:
    """Show what waits, what runs, what ended, and the workers."""
    if watch and since_s is not None:
        raise UsageError("--watch shows what happens and --since what happened; give one")
    settings = queue_settings(url)
    if watch:
        _watch(settings, as_json)
    elif since_s is not None:
        _since(settings, as_json, since_s)
    else:
        _once(settings, as_json)


def _once(settings: Settings, as_json: bool) -> None:
    """Prints one look at the queue."""
    record = _record_of(settings, asyncio.run(look(settings)))
    if as_json:
        click.echo(json.dumps(record, default=str))
    else:
        click.echo("\n".join(_lines(record)))


def _since(settings: Settings, as_json: bool, since_s: float) -> None:
    """Prints what happened in the last so many seconds, also when all workers are gone."""
    rows = asyncio.run(history(settings, since_s))
    if as_json:
        for row in rows:
            click.echo(json.dumps(asdict(row)))
        return
    click.echo("from              submitted  finished  waited  ran     waiting  workers  ended")
    for row in rows:
        ended = sum(row.finished.values())
        start = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.start_s))
        verdicts = ", ".join(f"{name} {count}" for name, count in sorted(row.finished.items()))
        click.echo(
            f"{start}  {row.submitted:9}  {ended:8}  {row.waited_s / max(1, ended):4.1f} s"
            f"  {row.ran_s / max(1, ended):4.1f} s  {row.waiting:7}  {row.workers:7}  {verdicts}"
        )
    if not rows:
        click.echo("nothing was noted in that time")


def _record_of(settings: Settings, found: Status) -> dict[str, Any]:
    """What ``leanq status --json`` prints."""
    counters = found.counters
    return {
        "url": without_password(settings.url),
        "waiting": [asdict(row) for row in found.priorities],
        "quarantined": dict(found.quarantined),
        "paused": dict(found.paused),
        "running": sum(row.held for row in found.workers),
        "dead": found.dead,
        "submitted": counters.get("submitted", 0),
        "settled": counters.get("settled", 0),
        "coalesced": counters.get("coalesced", 0),
        "remembered": counters.get("remembered", 0),
        "reaped": counters.get("reaped", 0),
        "released": counters.get("released", 0),
        "fenced": counters.get("fenced", 0),
        "prefixes": _counted(counters, "way:"),
        "warm_hits": counters.get("warm_hits", 0),
        "warm_misses": counters.get("warm_misses", 0),
        "reassignments": counters.get("reassignments", 0),
        "verdicts": _counted(counters, "verdict:"),
        "scaler": {environment: asdict(told) for environment, told in decisions_of(found).items()},
        "environments": {
            environment: info_of(about) for environment, about in sorted(found.environments.items())
        },
        "workers": [
            {
                "worker": row.worker,
                "running": row.held,
                "lease_s": round(row.lease_s, 1),
                **{k: v for k, v in info_of(row.info).items() if isinstance(v, _SHOWN.get(k, ()))},
            }
            for row in found.workers
        ],
    }


def _counted(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counters whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): n
        for name, n in sorted(counters.items())
        if name.startswith(prefix)
    }


_SHOWN: Mapping[str, type] = {"slots": int, "started": float, "environments": list}


def _lines(record: dict[str, Any]) -> Iterator[str]:
    """A record for people."""
    yield f"queue     {record['url']}"
    waiting = sum(row["waiting"] for row in record["waiting"])
    yield f"waiting   {waiting}"
    for row in record["waiting"]:
        text = f"{row['waiting']} of {row['tenants']} tenants"
        if row["held"]:
            text += f", {row['held']} held back"
        if row["held"] < row["waiting"]:
            text += f", the oldest for {row['oldest_s']:.1f} s"
        yield f"          {row['environment']}, priority {row['priority']}: {text}"
    for environment, count in record["quarantined"].items():
        yield f"          {environment}: {count} quarantined requests, each to run alone"
    for name, since_s in sorted(record["paused"].items()):
        what = "environment" if name.startswith("e:") else "tenant"
        yield f"paused    {what} {name[2:]}, since {time.time() - since_s:.0f} s (leanq resume)"
    yield f"running   {record['running']}"
    yield from _summary(record)
    for environment, about in record["environments"].items():
        yield f"offered   {environment}: {_about(about)}"
    for row in record["workers"]:
        yield f"worker    {row['worker']}: {', '.join(_worker_cells(row))}"
    if not record["workers"]:
        yield "worker    none is alive; start one with 'leanq worker'"


def _summary(record: dict[str, Any]) -> Iterator[str]:
    """The part of :func:`_lines` that is about the queue as a whole, and the scaler."""
    counts = ", ".join(f"{name} {count}" for name, count in record["verdicts"].items())
    yield f"ended     {counts or 'nothing yet'}"
    if record["coalesced"] or record["remembered"]:
        yield (
            f"saved     {record['coalesced']} by an identical request's run, "
            f"{record['remembered']} by a remembered verdict"
        )
    yield (
        f"trouble   {record['reaped']} reaped, {record['released']} released, "
        f"{record['fenced']} late results, {record['dead']} dead letters"
        f"{' (leanq dead list)' if record['dead'] else ''}"
    )
    if record["prefixes"]:
        ways = ", ".join(f"{name} {count}" for name, count in record["prefixes"].items())
        yield f"prefixes  {ways}"
    if record["warm_hits"] or record["warm_misses"]:
        yield (
            f"warm      {record['warm_hits']} hits, {record['warm_misses']} misses, "
            f"{record['reassignments']} stolen from workers that did not come"
        )
    for environment, told in record["scaler"].items():
        yield (
            f"scaler    {environment}: {told['target']} workers, before {told['order']} "
            f"({told['reason']}, {time.time() - told['at']:.0f} s ago, {told['who']}): "
            f"{told['text']}"
        )


def _worker_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """What a worker does, how long its lease lasts, since when it is there, and what it serves."""
    lease = f"lease {row['lease_s']} s" if row["lease_s"] > 0 else "LAPSED"
    age_s = time.time() - row.get("started", time.time())
    serves = f"serves {', '.join(map(str, row.get('environments', [])))}"
    return f"{row['running']} of {row.get('slots', '?')} slots", lease, f"up {age_s:.0f} s", serves


def _about(about: dict[str, Any]) -> str:
    if "lean" not in about:
        return str(about.get("driver", "?"))
    return f"Lean {about['lean']}, fingerprint {str(about.get('fingerprint', ''))[:12]}"


# --watch


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last look that succeeded, and what has been wrong since; either may be missing."""

    record: dict[str, Any] | None
    trouble: str = ""


_Show = Callable[[_Seen], None]


def _watch(settings: Settings, as_json: bool) -> None:
    """Shows the queue until interrupted: on a terminal in place, elsewhere look after look."""
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
    async with every_shard(settings) as queues:
        while True:
            start_s = loop.time()
            look = asyncio.create_task(fleet_stats_of(queues))
            try:
                while not (await asyncio.wait({look}, timeout=_EVERY_S))[0]:
                    late = f"no answer for {loop.time() - start_s:.0f} s"
                    show(_Seen(seen.record, late))
                seen = _Seen(_watched(settings, look.result(), rates))
            except QueueError as error:
                # It may come back, and then this goes on.
                seen = _Seen(seen.record, str(error))
            finally:
                look.cancel()
                await asyncio.gather(look, return_exceptions=True)
            show(seen)
            await asyncio.sleep(max(0.0, start_s + _EVERY_S - loop.time()))


class _Rates:
    """How many requests came and ended per second, by environment, over the last looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, tuple[int, int]]]] = deque(maxlen=_LOOKS)

    def add(self, seen: FleetStats) -> None:
        counts = {
            name: (l_.submitted, l_.finished.total()) for name, l_ in seen.environments.items()
        }
        # A server that was restarted, or a replica that took over, counts from less.
        if self._looks and any(
            counts.get(name, (0, 0))[n] < before[n]
            for name, before in self._looks[-1][1].items()
            for n in (0, 1)
        ):
            self._looks.clear()
        self._looks.append((seen.at_s, counts))

    def of(self, name: str) -> tuple[float, float] | None:
        """Per second; None where there were no two looks yet."""
        (start_s, first), (end_s, last) = self._looks[0], self._looks[-1]
        if end_s <= start_s:
            return None
        came, ended = (last[name][n] - first.get(name, (0, 0))[n] for n in (0, 1))
        return round(came / (end_s - start_s), 2), round(ended / (end_s - start_s), 2)


def _watched(settings: Settings, seen: FleetStats, rates: _Rates) -> dict[str, Any]:
    """That of ``leanq status`` with the time and, by environment, what moves; busiest first."""
    rates.add(seen)
    record = _record_of(settings, seen.status)
    record["workers"].sort(key=lambda row: (-row["running"], row["worker"]))
    environments = {}
    by_size = sorted(
        seen.environments.items(), key=lambda item: -(item[1].waiting + item[1].running)
    )
    for name, environment in by_size:
        came, ended = rates.of(name) or (None, None)
        environments[name] = {
            "waiting": environment.waiting + environment.quarantined,
            "oldest_s": round(environment.oldest_s, 1),
            "submitted_per_s": came,
            "finished_per_s": ended,
            "running": environment.running,
            "slots_busy": environment.busy,
            "slots_idle": environment.slots - environment.busy,
            "workers": environment.workers,
        }
    return {"at_s": seen.at_s} | record | {"environments": environments}


# Plain output


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
        click.echo("\n".join(_block(seen)) + "\n")

    yield show


def _block(seen: _Seen) -> Iterator[str]:
    yield f"at        {time.strftime('%Y-%m-%d %H:%M:%S')}"
    if seen.trouble or not seen.record:
        yield f"trouble   {seen.trouble}"
        return
    workers = seen.record["workers"]
    yield from _lines(seen.record | {"workers": workers[:_MOST_WORKERS]})
    if len(workers) > _MOST_WORKERS:
        yield f"          and {len(workers) - _MOST_WORKERS} more"
    for name, environment in seen.record["environments"].items():
        cells = ", ".join(map(" ".join, zip(_cells(environment), _TITLES, strict=True)))
        yield f"moves     {name}: {cells}"


_TITLES = ("waiting", "s old", "in/s", "out/s", "running", "slots busy", "idle", "workers")


def _cells(environment: dict[str, Any]) -> Iterator[str]:
    """One environment for people: under these titles, or before them."""
    yield f"{environment['waiting']:,}"
    yield f"{environment['oldest_s']:.0f}"
    for rate in (environment["submitted_per_s"], environment["finished_per_s"]):
        yield "–" if rate is None else f"{rate:,.1f}"
    for what in ("running", "slots_busy", "slots_idle", "workers"):
        yield f"{environment[what]:,.0f}"


# The live view


@contextlib.contextmanager
def _live() -> Iterator[_Show]:
    console = Console()
    # On a screen of its own, so that a terminal that changes its size is no trouble.
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last: RenderableType = ""

        def show(seen: _Seen) -> None:
            nonlocal last
            last = _view(seen, console)
            live.update(last, refresh=True)

        yield show
    # The screen is gone, and whoever ended it may want to keep what it showed.
    console.print(last)


def _view(seen: _Seen, console: Console) -> RenderableType:
    title = Text(f"leanq  {time.strftime('%H:%M:%S')}", style="bold")
    trouble = [_text(seen.trouble, "bold red")] if seen.trouble else []
    record = seen.record
    if record is None:
        return Group(title, *trouble)
    if trouble:
        trouble.append(Text(f"the last look was {time.time() - record['at_s']:.0f} s ago"))
    title.append_text(_text(f"  {record['url']}", "not bold dim"))
    shown = dict(list(record["environments"].items())[: max(1, console.height // 4)])
    environments = _table("environment", *_TITLES)
    for name, environment in shown.items():
        environments.add_row(_text(name), *_cells(environment))
    more = (
        [Text(f"and {n} more", style="dim")]
        if (n := len(record["environments"]) - len(shown))
        else []
    )
    told = {name: told for name, told in record["scaler"].items() if name in shown}
    about = [_row(line) for line in _summary(record | {"scaler": told})]
    head = Group(title, *trouble, Text(), environments, *more, Text(), *about, Text())
    # One line is the count of workers.
    room = console.height - len(console.render_lines(head, pad=False)) - 1
    return Group(head, *_workers(record["workers"], room))


def _workers(rows: list[dict[str, Any]], room: int) -> Iterator[RenderableType]:
    if not rows:
        yield Text("no worker is alive; start one with 'leanq worker'", style="yellow")
        return
    lapsed = sum(row["lease_s"] <= 0 for row in rows)
    count = Text(f"{len(rows) - lapsed} workers alive", style="bold")
    yield count.append(f", {lapsed} lapsed", style="red") if lapsed else count
    table = _table()
    for _ in range(5):
        table.add_column(no_wrap=True)
    for row in rows[: max(0, room)]:
        style = "red" if row["lease_s"] <= 0 else "" if row["running"] else "dim"
        table.add_row(*map(_text, (row["worker"], *_worker_cells(row))), style=style)
    yield table


def _table(*titles: str) -> Table:
    table = Table(box=None, show_header=bool(titles), pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def _row(text: str) -> Text:
    is_bad = text.startswith("trouble") and any(c in "123456789" for c in text)
    return _text(text, "yellow" if is_bad else "")


def _text(text: str, style: str = "") -> Text:
    """Without what would steer a terminal: names come from whoever wrote them into Redis."""
    return Text("".join(c if c.isprintable() else "�" for c in text), style=style)
