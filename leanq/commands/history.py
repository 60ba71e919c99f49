"""``leanq status --since``: prints and writes the history of the last hours."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from leanq.commands.common import tell
from leanq.fleet.history import Period, measures, noted, periods
from leanq.fleet.shown import counted, duration, table
from leanq.queue.settings import Settings

_MOST_TENANTS = 5


def used_by_tenant(used_s: Mapping[str, float]) -> str:
    """Returns the tenants that used most CPU time, the largest user first."""
    first = sorted(used_s.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{tenant or 'others'} {duration(used)}" for tenant, used in first[:_MOST_TENANTS]]
    more = f" and {len(first) - _MOST_TENANTS} more" if len(first) > _MOST_TENANTS else ""
    return ", ".join(shown) + more


def print_history(settings: Settings, since_s: float, as_json: bool) -> None:
    """Prints the history of the last seconds; it outlives the workers."""
    found = periods(asyncio.run(noted(settings, since_s)), since_s)
    tell(as_json, map(asdict, found), _lines(found))


def _lines(found: Sequence[Period]) -> Iterator[str]:
    if not found:
        yield "nothing was recorded in that time"
        return
    rows = []
    verdicts: Counter[str] = Counter()
    tenants: Counter[str] = Counter()
    for period in found:
        verdicts.update(period.finished)
        tenants.update(period.tenants_cpu_s)
        ended = sum(period.finished.values())
        rows.append(
            {
                "FROM": time.strftime("%m-%d %H:%M", time.localtime(period.start_s)),
                "SUBMITTED": f"{period.submitted:,}",
                "FINISHED": f"{ended:,}",
                "ACCEPTED": f"{period.finished.get('accepted', 0):,}",
                "WAIT": duration(period.waited_s / max(1, ended)),
                "RUN": duration(period.ran_s / max(1, ended)),
                "CPU": duration(period.cpu_s),
                "QUEUED": f"{period.waiting:,}",
                "WORKERS": f"{period.workers:,}",
            }
        )
    yield from table(rows)
    yield "WAIT and RUN are means, CPU is all; QUEUED and WORKERS the most at one time."
    if tenants:
        yield f"CPU time by tenant, the most first: {used_by_tenant(tenants)}."
    yield f"Finished in all: {counted(verdicts)}." if verdicts else "Nothing has finished."


def write_history(settings: Settings, since_s: float, out: str) -> None:
    """Writes the measures of the last seconds to a Parquet file; raises as
    :func:`write_parquet`."""
    found = measures(asyncio.run(noted(settings, since_s)))
    names = ("start", "environment", "what", "part", "value")
    write_parquet(
        out,
        lambda arrow: {
            "start": arrow.timestamp("s", "UTC"),
            **dict.fromkeys(names[1:4], arrow.string()),
            "value": arrow.float64(),
        },
        (dict(zip(names, row, strict=True)) for row in found),
    )
    click.echo(f"{out}: {len(found):,} rows of {duration(since_s)}")


def write_parquet(
    out: str, columns: Callable[[Any], Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Writes rows to a Parquet file, which is replaced once they are complete. ``columns`` makes
    the types of columns of the module ``pyarrow``.

    Raises:
        UsageError: pyarrow is missing, or the file cannot be written.
    """
    from leanq.campaigns.files import replacing
    from leanq.campaigns.parquet import pyarrow, write_table

    arrow, _ = pyarrow(out)
    with replacing(out) as stream:
        write_table(stream, rows, arrow.schema(columns(arrow)))
