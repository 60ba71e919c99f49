"""``leanq export-traces``: what was checked, as tables to train on."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from leanq.commands import options


@click.command("export-traces")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--out",
    required=True,
    metavar="FOLDER",
    help="The folder for the tables; traces that it has are not written again.",
)
@click.option(
    "--rows-per-shard",
    type=options.WholeRange(1),
    default=100_000,
    help="The most rows of one table.",
)
@click.option("--data", metavar="DATA", help="The campaign's data set, if it moved.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_traces(sources: tuple[str, ...], out: str, as_json: bool, **how: Any) -> None:
    """Write checks as tables to train on.

    A row has the text, its target, verdict, messages, goals and times. SOURCE is a finished
    campaign's results, whose data set is read again, or a folder of clients' records (record=).
    Equal traces are written once. Give the same command again to resume an interrupted export.
    """
    from leanq.campaigns import traces

    done = traces.export_traces(sources, out, **how)
    if as_json:
        click.echo(json.dumps({"out": out, **asdict(done)}))
        return
    parts = [f"{done.written:,} traces written in {done.shards:,} shards"]
    if done.known:
        parts.append(f"{done.known:,} were there already")
    parts += (f"{count:,} {what}" for what, count in sorted(done.skipped.items()))
    click.echo(f"{out}: {', '.join(parts)}")
