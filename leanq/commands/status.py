"""``leanq status``: one look at the queue."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click

from leanq.commands.fleet import queue_settings
from leanq.fleet.history import history
from leanq.fleet.stats import decisions_of, info_of
from leanq.queue.queue import look
from leanq.queue.results import Status
from leanq.queue.settings import Settings, without_password


def status(url: str | None, as_json: bool) -> None:
    """Prints one look at the queue."""
    settings = queue_settings(url)
    record = record_of(settings, asyncio.run(look(settings)))
    if as_json:
        click.echo(json.dumps(record, default=str))
    else:
        click.echo("\n".join(lines(record)))


def since(url: str | None, as_json: bool, since_s: float) -> None:
    """Prints what happened in the last so many seconds, also when all workers are gone."""
    rows = asyncio.run(history(queue_settings(url), since_s))
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


def record_of(settings: Settings, found: Status) -> dict[str, Any]:
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


def lines(record: dict[str, Any]) -> Iterator[str]:
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
    yield from summary(record)
    for environment, about in record["environments"].items():
        yield f"offered   {environment}: {_about(about)}"
    for row in record["workers"]:
        yield f"worker    {row['worker']}: {', '.join(worker_cells(row))}"
    if not record["workers"]:
        yield "worker    none is alive; start one with 'leanq worker'"


def summary(record: dict[str, Any]) -> Iterator[str]:
    """The part of :func:`lines` that is about the queue as a whole, and the scaler."""
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


def worker_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """What a worker does, how long its lease lasts, since when it is there, and what it serves."""
    lease = f"lease {row['lease_s']} s" if row["lease_s"] > 0 else "LAPSED"
    age_s = time.time() - row.get("started", time.time())
    serves = f"serves {', '.join(map(str, row.get('environments', [])))}"
    return f"{row['running']} of {row.get('slots', '?')} slots", lease, f"up {age_s:.0f} s", serves


def _about(about: dict[str, Any]) -> str:
    if "lean" not in about:
        return str(about.get("driver", "?"))
    return f"Lean {about['lean']}, fingerprint {str(about.get('fingerprint', ''))[:12]}"
