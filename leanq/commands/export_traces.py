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
    help="The folder to which tables are added; what it has is not written again.",
)
@click.option(
    "--rows-per-shard",
    type=options.WholeRange(1),
    metavar="N",
    default=100_000,
    show_default=True,
    help="At most so many rows go into one table.",
)
@click.option("--data", metavar="DATA", help="Where the campaign's data set is now, if it moved.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_traces(sources: tuple[str, ...], out: str, as_json: bool, **how: Any) -> None:
    """Write what was checked as tables to train on.

    A row has the text, what it was to prove, verdict, messages, goals and times. SOURCE is the
    results of a finished campaign, whose data set is read again, or a folder that clients have
    recorded into (record=). Traces are told apart by what was asked and answered: equal ones are
    written once, and an export that was interrupted goes on where the same command is given again.
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
