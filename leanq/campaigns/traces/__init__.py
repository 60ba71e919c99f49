"""Traces: checks and Lean's answers, as tables to train on (docs/traces.md).

- ``rows`` defines a row, and the hash that tells equal ones;
- ``sources`` joins a campaign's results with its data set, reads the journals of clients, and finds
  the goals that steps began with;
- ``shards`` writes new rows into a folder of tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from leanq.campaigns.dataset import Dataset
from leanq.campaigns.traces.rows import Row
from leanq.campaigns.traces.shards import Shards
from leanq.campaigns.traces.sources import Goals, is_recorded, of_campaign, of_journals


@dataclass(frozen=True, slots=True)
class Exported:
    """The outcome of an export: rows and tables that were added, rows that were there already, and
    records that make no row, by the reason."""

    written: int
    shards: int
    known: int
    skipped: Mapping[str, int]


def export_traces(
    sources: Sequence[str],
    out: str,
    *,
    rows_per_shard: int = 100_000,
    data: str | Dataset | None = None,
) -> Exported:
    """Adds the traces of ``sources`` to the folder ``out``, except those that it has.

    Args:
        sources: results of campaigns, journals of clients, and folders of these.
        data: the path of the campaigns' data set, if it was moved; or the data set, if it is no
            file.

    Raises:
        UsageError: pyarrow is missing, a source cannot be read, or ``out`` cannot be written.
            Complete shards stay, and the next call continues behind them.
    """

    def found(skipped: Counter[str]) -> Iterator[Row]:
        # One stream of rows, so that the end of a source cuts no shard short.
        for source in sources:
            if is_recorded(source):
                yield from of_journals(source, skipped)
            else:
                yield from of_campaign(source, data, skipped)

    skipped: Counter[str] = Counter()
    with Shards(out, rows_per_shard) as shards, Goals() as goals:
        if any(map(is_recorded, sources)):
            # One client may step from a state that another client's journal leads to.
            goals.learn(found(Counter()))
        shards.add(goals.fill_in(found(skipped)))
    return Exported(shards.written, shards.shards, shards.known, dict(skipped))
