"""``leanq report cost``: what verdicts cost, by day, tenant, environment and campaign."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, get_args

import click

from leanq.commands import options
from leanq.commands.common import queue_settings, tell
from leanq.commands.history import write_parquet
from leanq.errors import UsageError
from leanq.fleet.costs import Cost, Costs, costs
from leanq.fleet.shown import counted, plural, printable, table
from leanq.queue.requests import Verdict

# The most rows of a day that are printed; JSON and Parquet have all.
_MOST_ROWS = 20
_HOUR_S = 3600


def _price(text: str) -> float:
    """Reads a price such as 0.01/cpu-h, for an hour of CPU time, in a currency of the caller's."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)/cpu-h", text, re.ASCII)
    if not match:
        raise click.BadParameter(
            f"{text!r:.60} is not a price; expected a number that is not negative, and what "
            "it is for: 0.01/cpu-h"
        )
    return float(match[1])


@click.group()
def report() -> None:
    """Report on what the queue has done."""


@report.command()
@options.queue
@click.option(
    "--since",
    "since_s",
    type=options.DURATION,
    default="7d",
    help="All days (UTC) that the last 24h or 7d touch; the queue keeps 100 days.",
)
@click.option(
    "--price", type=_price, metavar="PRICE", help="What an hour of CPU costs: 0.01/cpu-h."
)
@click.option("--out", metavar="FILE", help="Write the rows to a Parquet file instead.")
def cost(
    url: str | None, as_json: bool, since_s: float, price: float | None, out: str | None
) -> None:
    """Show CPU time, attempts and verdicts by day, tenant, environment, campaign.

    \b
    Counted are
    - each attempt that began, also one that was lost or withdrawn
    - the CPU time of each attempt that ended: cpu_s of its reply, Lean's and the judge's,
      even if another attempt's result was taken
    - each result that was taken, by its verdict

    \b
    Not counted are
    - requests without a run of their own: expired or withdrawn in the queue, poisoned,
      remembered, or joined to an identical one
    - the CPU time of attempts that did not end: of killed workers, withdrawn requests
    - the last seconds of a killed worker, since workers tell with their heartbeats
    - workers themselves, Redis, headers that the fork server imports, goals, echoes

    Beyond 4,000 counts a day in a shard, new ones have no campaign; beyond 5,000, no tenant.
    """
    if as_json and out is not None:
        raise UsageError("give either --json or --out")
    settings = queue_settings(url)
    found = asyncio.run(costs(settings, since_s))
    if out is not None:
        _write(found.rows, price, out)
        click.echo(f"{out}: {plural(len(found.rows), 'row')}; {_since(found)}")
        return
    tell(as_json, (_record(row, price) for row in found.rows), _lines(found, price))
    if as_json:
        click.echo(f"leanq: {_since(found)}", err=True)


def _since(found: Costs) -> str:
    if found.since is None:
        return "no worker has told what runs cost"
    return f"complete from {found.since:%Y-%m-%d %H:%M} UTC on"


def _record(row: Cost, price: float | None) -> dict[str, Any]:
    names = {name: getattr(row, name) for name in ("tenant", "environment", "campaign")}
    spent = {"cpu_s": round(row.cpu_s, 3), "attempts": row.attempts, "verdicts": dict(row.ended)}
    cost = None if price is None else row.cpu_s / _HOUR_S * price
    return {"day": row.day.isoformat(), **names, **spent, "cost": cost}


def _lines(found: Costs, price: float | None) -> Iterator[str]:
    rows = []
    for day, of_day in groupby(found.rows, key=attrgetter("day")):
        costs = list(of_day)
        for row in costs[:_MOST_ROWS]:
            names = {"TENANT": row.tenant, "ENVIRONMENT": row.environment, "CAMPAIGN": row.campaign}
            shown = {title: printable(name or "–") for title, name in names.items()}
            rows.append({"DAY": str(day), **shown, **_sums([row], price)})
        if rest := costs[_MOST_ROWS:]:
            more = {"TENANT": f"and {len(rest):,} more", "ENVIRONMENT": "", "CAMPAIGN": ""}
            rows.append({"DAY": str(day), **more, **_sums(rest, price)})
    yield from table(rows, left=("DAY", "TENANT", "ENVIRONMENT", "CAMPAIGN"))
    sums = _sums(found.rows, price)
    ended = sum((Counter(row.ended) for row in found.rows), Counter[str]())
    said = f"in all {sums['CPU s']} CPU s in {sums['ATTEMPTS']} attempts"
    if "COST" in sums:
        said += f", which cost {sums['COST']}"
    if price and ended["accepted"]:
        total = sum(row.cpu_s for row in found.rows) / _HOUR_S * price
        said += f", {total / ended['accepted']:.3g} for each accepted"
    yield printable(f"{said}; ended: {counted(ended) or 'nothing'}")
    yield _since(found)


def _sums(rows: Sequence[Cost], price: float | None) -> dict[str, str]:
    """Returns the sums of rows by their titles, as people see them."""
    cpu_s = sum(row.cpu_s for row in rows)
    return {
        "CPU s": f"{cpu_s:,.1f}",
        "ATTEMPTS": f"{sum(row.attempts for row in rows):,}",
        "ENDED": f"{sum(sum(row.ended.values()) for row in rows):,}",
        "ACCEPTED": f"{sum(row.ended.get('accepted', 0) for row in rows):,}",
        **({} if price is None else {"COST": f"{cpu_s / _HOUR_S * price:,.4f}"}),
    }


def _write(rows: Sequence[Cost], price: float | None, out: str) -> None:
    """Writes the rows to a Parquet file, with a column for each verdict."""
    ends = (*get_args(Verdict), "error")
    write_parquet(
        out,
        lambda arrow: {
            "day": arrow.date32(),
            **dict.fromkeys(("tenant", "environment", "campaign"), arrow.string()),
            "cpu_s": arrow.float64(),
            "attempts": arrow.int64(),
            **dict.fromkeys(ends, arrow.int64()),
            "cost": arrow.float64(),
        },
        (
            {**_record(row, price), "day": row.day, **{end: row.ended.get(end, 0) for end in ends}}
            for row in rows
        ),
    )
