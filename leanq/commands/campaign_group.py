"""The commands of ``leanq campaign``, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from leanq.commands import options

_F = TypeVar("_F", bound=Callable[..., Any])


@click.group()
def campaign() -> None:
    """Check whole data sets, here and now or as jobs of RQ.

    RQ is in the Redis of LEANQ_RQ_URL, or else in the queue's own.
    """


def _described(command: _F) -> _F:
    """What a campaign is to do."""
    for option in reversed(
        (
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
            click.option(
                "--header-field", metavar="NAME", help="A field with what goes before the code."
            ),
            click.option(
                "--prompt-field", metavar="NAME", help="A field with what the code completes."
            ),
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
    ):
        command = option(command)
    return command


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
    from leanq.commands.campaign import run as run_it

    return run_it(_campaign(**how), url, as_json)


@campaign.command()
@_described
@click.option(
    "--in", "delay_s", type=options.DURATION, metavar="TIME", help="Begin after 30m, 12h or 1d."
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
    from leanq.commands.campaign import submit as send

    send(_campaign(**how), url, as_json, delay_s, after)


@campaign.command("list")
@options.queue
def list_(url: str | None, as_json: bool) -> None:
    """Show the campaigns that were sent, the newest first."""
    from leanq.commands.campaign import show_all

    show_all(url, as_json)


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def show(id_: str, url: str | None, as_json: bool) -> None:
    """Show one campaign: what it does, how far it is, what went wrong."""
    from leanq.commands.campaign import show as show_one

    show_one(id_, url, as_json)


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def pause(id_: str, url: str | None, as_json: bool) -> None:
    """Hold a campaign; what is in flight is withdrawn, what has come is kept."""
    from leanq.campaigns.rq_queue import Campaigns
    from leanq.commands.campaign import change

    change(id_, url, as_json, Campaigns.pause)


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def resume(id_: str, url: str | None, as_json: bool) -> None:
    """Let a campaign go on that was paused."""
    from leanq.campaigns.rq_queue import Campaigns
    from leanq.commands.campaign import change

    change(id_, url, as_json, Campaigns.resume)


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def cancel(id_: str, url: str | None, as_json: bool) -> None:
    """End a campaign; what has come stays beside its results."""
    from leanq.campaigns.rq_queue import Campaigns
    from leanq.commands.campaign import change

    change(id_, url, as_json, Campaigns.cancel)


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def retry(id_: str, url: str | None, as_json: bool) -> None:
    """Take a campaign up again that failed, was cancelled or has finished.

    One that has finished checks its rows without a verdict of Lean's once more.
    """
    from leanq.campaigns.rq_queue import Campaigns
    from leanq.commands.campaign import change

    change(id_, url, as_json, Campaigns.retry)


@campaign.command()
@options.queue
@click.option("--burst", is_flag=True, help="End when there is none left to begin.")
def worker(url: str | None, as_json: bool, burst: bool) -> None:
    """Run campaigns from RQ, one at a time, until SIGTERM.

    One that runs then goes back, and on with the next worker. --json logs as JSON.
    """
    from leanq.commands.campaign import work

    work(url, as_json, burst)


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


def _campaign(data: str, out: str, **how: Any) -> Any:
    from leanq.campaigns.campaign import Campaign
    from leanq.campaigns.coordinator import Plan
    from leanq.campaigns.dataset import Fields

    names = ("id", "code", "problem", "header", "prompt")
    fields = Fields(**{name: how.pop(f"{name}_field") for name in names})
    plan = {name: how.pop(name) for name in ("window", "first_success", "order")}
    options: Any = {**how, "allow_axioms": list(how["allow_axioms"])}
    return Campaign(data, out, fields, Plan(options, **plan))
