"""``leanq campaign``: whole data sets, here and now or as jobs of RQ.

What campaigns alone need, RQ among it, is imported where it is used: other commands do without.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.common import EXIT_USAGE, exit_code, interruptible, queue_url, worst
from leanq.errors import UnavailableError, UsageError
from leanq.fleet.logging import log_to_stderr
from leanq.queue.settings import Settings, check_name, check_url, each_host

if TYPE_CHECKING:
    import redis

    from leanq.campaigns.campaign import Campaign
    from leanq.campaigns.coordinator import Command
    from leanq.campaigns.rq_queue import Campaigns, Sent

_NO_CLUSTER = "RQ needs one Redis that is no cluster; name it with LEANQ_RQ_URL"


@click.group()
def campaign() -> None:
    """Check whole data sets, here and now or as jobs of RQ.

    RQ is in the Redis of LEANQ_RQ_URL, or else in the queue's own.
    """


_described = options.combined(
    click.argument("data"),
    click.option("--out", required=True, metavar="RESULTS", help="Where results go."),
    options.queue,
    options.env,
    options.lean,
    click.option(
        "--id-field",
        metavar="NAME",
        default="id",
        show_default=True,
        help="The field with a row's id.",
    ),
    click.option(
        "--code-field",
        metavar="NAME",
        default="code",
        show_default=True,
        help="The field with its code, or with a list of attempts.",
    ),
    click.option(
        "--problem-field",
        metavar="NAME",
        help="The field that names the problem, where several rows attempt one.",
    ),
    click.option("--header-field", metavar="NAME", help="A field with what goes before the code."),
    click.option("--prompt-field", metavar="NAME", help="A field with what the code completes."),
    click.option(
        "--first-success",
        is_flag=True,
        help="Stop a problem's other attempts at its first success.",
    ),
    click.option(
        "--order",
        type=click.Choice(["input", "finished"]),
        default="input",
        show_default=True,
        help="The order of the results.",
    ),
    click.option(
        "--window",
        type=click.IntRange(1, 100_000),
        default=1000,
        show_default=True,
        help="Requests in flight at a time.",
    ),
)
"""What a campaign is to do."""


@campaign.command()
@_described
def run(url: str | None, as_json: bool, **how: Any) -> int:
    """Check a data set: JSONL, a folder of .lean files, or Parquet.

    RESULTS has a record for each row, as JSONL, or as Parquet if its name ends so. Interrupted, the
    same command goes on where it was. Without a queue, a server and a worker are started for the
    length of the call.

    Exit code: 0 if all are accepted, 1 if Lean says no, 2 for bad rows, 3 where leanq could not
    give Lean's verdict.
    """
    made = _campaign(**how)
    try:
        counts = interruptible(_run(made, url, as_json))
    except KeyboardInterrupt:
        click.echo("leanq: stopped; the same command goes on from here", err=True)
        raise
    # What was stopped since a sibling had succeeded is no failure.
    kinds = {name for name, count in counts.items() if count} - {"echoed"}
    if made.plan.first_success:
        kinds -= {"cancelled"}
    return worst({EXIT_USAGE if name == "error" else exit_code(name) for name in kinds})


@campaign.command()
@_described
@click.option(
    "--in", "delay_s", type=options.DURATION, metavar="DURATION", help="Begin after 30m, 12h or 1d."
)
@click.option(
    "--after",
    multiple=True,
    metavar="ID",
    help="Begin after a campaign has finished, if need be by a retry.",
)
def submit(
    url: str | None, as_json: bool, delay_s: float | None, after: tuple[str, ...], **how: Any
) -> None:
    """Send a campaign to RQ, and print its id.

    DATA and RESULTS are paths on the machines where 'leanq campaign worker' runs.
    """
    made = _campaign(**how)
    # The worker has another working directory.
    data, out = os.path.abspath(made.data), os.path.abspath(made.out)
    if not os.path.exists(data):
        click.echo(f"leanq: {data} is not on this machine; it must be on the workers'", err=True)
    with _campaigns(url) as campaigns:
        id_ = campaigns.submit(
            replace(made, data=data, out=out), delay_s=delay_s or 0.0, after=after
        )
    click.echo(json.dumps({"id": id_}) if as_json else id_)


@campaign.command("list")
@options.queue
def list_(url: str | None, as_json: bool) -> None:
    """Show the campaigns that were sent, the newest first."""
    with _campaigns(url) as campaigns:
        found = sorted(
            campaigns.list(),
            key=lambda each: each.sent.timestamp() if each.sent else 0,
            reverse=True,
        )
    for each in found:
        click.echo(json.dumps(_record(each)) if as_json else _line(each))
    if not found and not as_json:
        click.echo("no campaigns")


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def show(id_: str, url: str | None, as_json: bool) -> None:
    """Show one campaign: what it does, how far it is, what went wrong."""
    with _campaigns(url) as campaigns:
        sent = campaigns.show(id_)
    if as_json:
        click.echo(json.dumps(_record(sent)))
        return
    click.echo(_line(sent))
    plan = sent.campaign.plan
    options = ", ".join(f"{name} {value}" for name, value in sorted(plan.options.items()))
    rows = {
        "data": sent.campaign.data,
        "results": sent.campaign.out,
        "sent": sent.sent.isoformat(" ", "seconds"),
        "begins": sent.begins.isoformat(" ", "seconds") if sent.begins else "",
        "after": ", ".join(sent.after),
        "checks": options,
        "window": plan.window,
        "bad rows": "\n".join(sent.bad),
        "error": sent.error or "",
    }
    for name, value in rows.items():
        if value:
            head, *more = str(value).splitlines()
            click.echo("\n".join([f"  {name:9} {head}", *(f"{'':12}{line}" for line in more)]))


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def pause(id_: str, url: str | None, as_json: bool) -> None:
    """Hold a campaign; what is in flight is withdrawn, what has come is kept."""
    _change(id_, url, as_json, "pause")


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def resume(id_: str, url: str | None, as_json: bool) -> None:
    """Let a campaign go on that was paused."""
    _change(id_, url, as_json, "resume")


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def cancel(id_: str, url: str | None, as_json: bool) -> None:
    """End a campaign; what has come stays beside its results."""
    _change(id_, url, as_json, "cancel")


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def retry(id_: str, url: str | None, as_json: bool) -> None:
    """Take a campaign up again that failed, was cancelled or has finished.

    One that has finished checks its rows without a verdict of Lean's once more.
    """
    _change(id_, url, as_json, "retry")


@campaign.command()
@options.queue
@click.option("--burst", is_flag=True, help="End when there is none left to begin.")
def worker(url: str | None, as_json: bool, burst: bool) -> None:
    """Run campaigns from RQ, one at a time, until SIGTERM.

    One that runs then goes back, and on with the next worker. --json logs as JSON.
    """
    from leanq.campaigns.rq_worker import work

    log_to_stderr(as_json)
    # Campaigns are coordinated in processes of their own, which find the queue by this.
    os.environ["LEANQ_URL"] = named = queue_url(url)
    # Better now than in each campaign.
    AsyncLeanQClient(named)
    with _connected(url) as connection:
        work(connection, _prefix(), burst=burst)


@campaign.command()
@click.argument("results")
@click.option("--against", metavar="OLDER", help="Results to compare with.")
@click.option(
    "--output",
    metavar="FILE",
    help="Where the report goes, as Markdown, and a plot beside it [default: beside RESULTS].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(results: str, against: str | None, output: str | None, as_json: bool) -> int:
    """Report on a campaign's results: verdicts, pass@k, times, what is slow or flaky.

    Prints it, and writes it with a plot.
    """
    from leanq.commands.report import report as run_it

    return run_it(results, against, output, as_json)


async def _run(campaign: Campaign, url: str | None, as_json: bool) -> dict[str, int]:
    from leanq.commands.progress import Shown, summary
    from leanq.commands.submit import hint, queue_at

    started = time.monotonic()
    async with queue_at(url) as (place, worker), AsyncLeanQClient(place) as client:
        idle = asyncio.create_task(hint(client.clusters, campaign.plan.options))
        with Shown(campaign.data, as_json) as shown:
            running: asyncio.Task[Command] = asyncio.create_task(campaign.run(client, shown))
            try:
                ends: set[asyncio.Future[Any]] = {running, *worker}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for ended in worker:
                    if ended.done():
                        ended.result()
                await running
            finally:
                idle.cancel()
                running.cancel()
                await asyncio.gather(idle, running, return_exceptions=True)
    counts, wall_s = shown.counts, time.monotonic() - started
    if as_json:
        click.echo(json.dumps({"out": campaign.out, "counts": counts, "wall_s": round(wall_s, 3)}))
    else:
        click.echo(f"{campaign.out}: {summary(counts)} in {wall_s:.1f} s")
    return counts


def _campaign(data: str, out: str, **how: Any) -> Any:
    from leanq.campaigns.campaign import Campaign
    from leanq.campaigns.coordinator import Plan
    from leanq.campaigns.dataset import Fields

    names = ("id", "code", "problem", "header", "prompt")
    fields = Fields(**{name: how.pop(f"{name}_field") for name in names})
    plan = {name: how.pop(name) for name in ("window", "first_success", "order")}
    options: Any = {**how, "allow_axioms": list(how["allow_axioms"])}
    return Campaign(data, out, fields, Plan(options, **plan))


def _change(
    id_: str, url: str | None, as_json: bool, how: Literal["pause", "resume", "cancel", "retry"]
) -> None:
    """Does it, and prints what state the campaign is in then."""
    with _campaigns(url) as campaigns:
        getattr(campaigns, how)(id_)
        sent = campaigns.show(id_)
    click.echo(json.dumps(_record(sent)) if as_json else _line(sent))


@contextlib.contextmanager
def _campaigns(url: str | None) -> Iterator[Campaigns]:
    from leanq.campaigns.rq_queue import Campaigns

    with _connected(url) as connection:
        yield Campaigns(connection, _prefix())


@contextlib.contextmanager
def _connected(url: str | None) -> Iterator[redis.Redis]:
    """RQ's Redis: LEANQ_RQ_URL, or the queue's own where RQ can use that."""
    import redis

    named = os.environ.get("LEANQ_RQ_URL") or queue_url(url)
    try:
        check_url(named)
    except UsageError as error:
        raise UsageError(f"{error} ({_NO_CLUSTER})") from None
    if len(each_host(named)) > 1:
        raise UsageError(_NO_CLUSTER)
    try:
        with contextlib.closing(redis.Redis.from_url(named)) as connection:
            about: Any = connection.info("cluster")
            if about.get("cluster_enabled"):
                raise UsageError(_NO_CLUSTER)
            yield connection
    except redis.RedisError as error:
        raise UnavailableError(f"RQ's Redis: {error}") from None


def _prefix() -> str:
    return check_name("LEANQ_PREFIX", os.environ.get("LEANQ_PREFIX", Settings.prefix))


def _line(sent: Sent) -> str:
    from leanq.commands.progress import summary

    of = "" if sent.total is None else f" of {sent.total:,}"
    told = f"; {summary(sent.counts)}" if sent.counts else ""
    why = f" ({sent.error})" if sent.error and sent.error != sent.state else ""
    name = Path(sent.campaign.data).name
    return f"{sent.id}  {sent.state}{why}  {name}: {sent.rows:,}{of} rows{told}"


def _record(sent: Sent) -> dict[str, Any]:
    return {
        **asdict(sent),
        "sent": sent.sent.isoformat(),
        "begins": sent.begins.isoformat() if sent.begins else None,
    }
