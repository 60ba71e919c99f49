"""``leanq campaign``: checks whole data sets, at once or as jobs of RQ.

Only the commands that need RQ import it, since a plain installation lacks it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from leanq.campaigns.rq_connection import require_rq, rq_connection, submitted_campaigns
from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.common import (
    EXIT_OK,
    EXIT_USAGE,
    Stopped,
    beside,
    exit_code,
    interruptible,
    queue_url,
    tell,
)
from leanq.errors import UnavailableError, UsageError
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.shown import counted
from leanq.queue.settings import Settings, check_name

if TYPE_CHECKING:
    from leanq.campaigns.campaign import Campaign
    from leanq.campaigns.rq_queue import Campaigns, CampaignStatus
    from leanq.commands.progress import Shown
    from leanq.fleet.prometheus import Sample

log = logging.getLogger("leanq.campaign")

_SHAPES = ("auto", "plain", "kimina", "lean-workbook", "minif2f", "proofnet", "putnambench")
# The most rows of a report's list. A terminal shows few; the page has the rest.
_PRINTED_ROWS, _WRITTEN_ROWS = 30, 2000
# The fields of a data set that an option names.
_FIELDS = {
    "id": "a row's id [default: id, or the shape's]",
    "code": "the row's code, or with a list of attempts [default: code, or the shape's]",
    "problem": "the problem that a row is an attempt at",
    "target": "the theorems to prove, as Lean text with sorry for proofs. Each row's code is "
    "verified against them [default: the shape's]",
    "header": "lines that precede the code",
    "prompt": "text that the code continues",
    "tags": "tags, by which reports group",
}


@click.group()
def campaign() -> None:
    """Check whole data sets, at once or as jobs of RQ.

    RQ uses the Redis of LEANQ_RQ_URL, or else the queue's own.
    """


_described = options.combined(
    click.argument("data"),
    click.option(
        "--out",
        metavar="RESULTS",
        help="The file for the results; required. Parquet if its name ends so, else JSONL.",
    ),
    options.env,
    options.lean,
    click.option(
        "--shape",
        type=click.Choice(_SHAPES),
        metavar="SHAPE",
        default="auto",
        help=f"The problem set whose fields the data has: {', '.join(_SHAPES[2:])}; plain is none. "
        "Without a named field, auto recognises it.",
    ),
    *(
        click.option(f"--{name}-field", metavar="NAME", help=f"The field with {text}.")
        for name, text in _FIELDS.items()
    ),
    click.option(
        "--no-target",
        is_flag=True,
        help="Check the codes, instead of verifying them against their rows' statements.",
    ),
    click.option(
        "--first-success",
        is_flag=True,
        help="Cancel a problem's other attempts at its first success.",
    ),
    click.option(
        "--goals",
        is_flag=True,
        help="Tell the goals before each tactic, too; export-traces makes rows of them.",
    ),
    click.option(
        "--replay",
        metavar="NAME",
        help="A replay memory that also gets the results.",
    ),
    click.option(
        "--window",
        type=options.WholeRange(1, 100_000),
        default=1000,
        help="Requests in flight at a time.",
    ),
)
"""The options that describe a campaign."""


@campaign.command()
@_described
@options.client
@options.embedded
def run(url: str | None, as_json: bool, embedded: bool, **how: Any) -> int:
    """Check a data set: JSONL, a folder of .lean files, or Parquet.

    RESULTS has a record for each row, or for each attempt of a row. After an interruption, the same
    command resumes the campaign. If nothing names a queue, a server and a worker run for the length
    of the call.

    Exit code: 0 if all are accepted (with --first-success: if every problem is solved). Otherwise 1
    for another verdict of Lean's, 2 for bad rows, 3 for an outcome of leanq's. Of several codes,
    the highest counts.
    """
    from leanq.commands.progress import Shown

    made = _campaign(**how)
    shown = Shown(made.data, made.out, as_json)
    try:
        interruptible(_run(made, shown, url, as_json, embedded=embedded))
    except Stopped as stopped:
        click.echo(f"leanq: {stopped} after {shown.rows}; the same command resumes it", err=True)
        raise
    last = shown.last
    kinds = {name for name, count in last.counts.items() if count} - {"echoed"}
    if made.plan.first_success:
        # A solved problem's failed attempts are no failures, and cancelled attempts never are.
        kinds = kinds & {"error"} if last.unsolved == 0 else kinds - {"cancelled"}
    codes = (EXIT_USAGE if name == "error" else exit_code(name) for name in kinds)
    return max(codes, default=EXIT_OK)


@campaign.command()
@_described
@options.queue
@click.option("--in", "delay_s", type=options.DURATION, help="Start after 30m, 12h or 1d.")
@click.option(
    "--after",
    multiple=True,
    metavar="ID",
    help="Start once this campaign has finished; may be repeated.",
)
def submit(
    url: str | None, as_json: bool, delay_s: float | None, after: tuple[str, ...], **how: Any
) -> None:
    """Submit a campaign to RQ, and print its id.

    DATA and RESULTS are paths on the machines where 'leanq campaign worker' runs.
    """
    made = _campaign(**how)
    # The worker has another working directory.
    data, out = os.path.abspath(made.data), os.path.abspath(made.out)
    if not os.path.exists(data):
        click.echo(
            f"leanq: {data} is not on this machine; the campaign workers' machines have to have it",
            err=True,
        )
    with campaigns_at(url) as campaigns:
        id_ = campaigns.submit(
            replace(made, data=data, out=out), delay_s=delay_s or 0.0, after=after
        )
    click.echo(json.dumps({"id": id_}) if as_json else id_)


@campaign.command("list")
@options.queue
def list_(url: str | None, as_json: bool) -> None:
    """List the submitted campaigns, the newest first."""
    with campaigns_at(url) as campaigns:
        found = sorted(campaigns.list(), key=lambda each: -each.submitted_at.timestamp())
    tell(as_json, map(_record, found), [*map(_line, found)] or ["no campaigns"])


@campaign.command()
@click.argument("id_", metavar="ID")
@options.queue
def show(id_: str, url: str | None, as_json: bool) -> None:
    """Show one campaign: what it checks, its progress, and what went wrong."""
    with campaigns_at(url) as campaigns:
        status = campaigns.show(id_)
    if as_json:
        click.echo(json.dumps(_record(status)))
        return
    click.echo(_line(status))
    plan = status.campaign.plan
    options = ", ".join(f"{name} {value}" for name, value in sorted(plan.options.items()))
    rows = {
        "data": status.campaign.data,
        "results": status.campaign.out,
        "submitted": status.submitted_at.isoformat(" ", "seconds"),
        "starts": status.starts_at.isoformat(" ", "seconds") if status.starts_at else "",
        "after": ", ".join(status.after),
        "options": options,
        "window": plan.window,
        "replay": status.campaign.replay,
        "bad rows": "\n".join(status.bad_rows),
        "warnings": "\n".join(status.warnings),
        "resumed": status.resumed or "",
        "error": status.error or "",
    }
    for name, value in rows.items():
        if value:
            head, *more = str(value).splitlines()
            click.echo("\n".join([f"  {name:9} {head}", *(f"{'':12}{line}" for line in more)]))


_CHANGES = {
    "pause": "Pause a campaign: withdraw its requests in flight, and keep its results.",
    "resume": "Resume a paused campaign.",
    "cancel": "Cancel a campaign, and keep its results for a retry.",
    "retry": """Run a campaign again that failed, was cancelled or has finished.

    One that failed or was cancelled resumes. A finished one checks those rows again that have no
    verdict of Lean's.
    """,
}


def _add_change(how: str, text: str) -> None:
    @campaign.command(how, help=text)
    @click.argument("id_", metavar="ID")
    @options.queue
    def change(id_: str, url: str | None, as_json: bool) -> None:
        with campaigns_at(url) as campaigns:
            getattr(campaigns, how)(id_)
            status = campaigns.show(id_)
        click.echo(json.dumps(_record(status)) if as_json else _line(status))


for _how, _text in _CHANGES.items():
    _add_change(_how, _text)


@campaign.command()
@options.queue
@click.option("--burst", is_flag=True, help="End when no campaign is left to start.")
@click.option(
    "--metrics-port",
    type=options.PORT,
    help="Serve /metrics about all campaigns on this port; 0 takes any free one, and logs it.",
)
@options.metrics_host
def worker(
    url: str | None, as_json: bool, burst: bool, metrics_port: int | None, metrics_host: str
) -> None:
    """Run campaigns from RQ, one at a time, until SIGTERM.

    SIGTERM requeues the running campaign, and the next worker resumes it. --json logs as JSON.
    """
    require_rq()
    from leanq.campaigns.campaign import State
    from leanq.campaigns.rq_worker import work
    from leanq.fleet.prometheus import page_at

    def read() -> Iterator[Sample]:
        try:
            with campaigns_at(url) as campaigns:
                found = [(each.state, each.rows) for each in campaigns.list()]
        except UnavailableError as error:
            log.warning("%s", error)
            return
        states = Counter(state for state, _ in found)
        for state in get_args(State):
            yield "leanq_campaigns", (state,), states[state]
        yield "leanq_campaign_rows", (), sum(rows for _, rows in found)

    log_to_stderr(as_json)
    # Coordinators are processes of their own, which find the queue by this.
    os.environ["LEANQ_URL"] = named = queue_url(url)
    # A wrong URL is refused now, and not in each campaign.
    AsyncLeanQClient(named)
    page = page_at(metrics_port, "campaign worker", read, host=metrics_host)
    with rq_connection(_rq_url(url)) as connection, page:
        work(connection, _prefix(), burst=burst)


@campaign.command()
@click.argument("results")
@click.option(
    "--output",
    metavar="FILE",
    help="The file for the page [default: RESULTS, with .report.html as its suffix].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(results: str, output: str | None, as_json: bool) -> int:
    """Report on a campaign's results: verdicts, pass@k, times, slow and flaky texts.

    Prints the report, and writes it as one HTML page that works offline.
    """
    from leanq.campaigns.report.figures import summarise
    from leanq.campaigns.report.outcomes import one_line, outcomes
    from leanq.campaigns.report.page import page
    from leanq.campaigns.report.sections import sections, text
    from leanq.campaigns.results import read_results

    path = _page_path(results, output)
    found = summarise(outcomes(read_results(results), results))
    title, intro = one_line(f"Report on {Path(results).name}"), one_line(results, 1000)
    written = page(title, intro, found, sections(found, _WRITTEN_ROWS))
    try:
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or path}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps({"results": results, **asdict(found), "written": str(path)}))
    else:
        click.echo(f"{intro}\n\n{text(sections(found, _PRINTED_ROWS))}\n")
        click.echo(f"written: {path}")
    return EXIT_OK


def _page_path(results: str, output: str | None) -> Path:
    for path in (Path(results), Path(output or results)):
        if not path.name:
            raise UsageError(f"{path} is a folder")
    page_path = Path(output) if output else Path(results).with_suffix(".report.html")
    if page_path.resolve() == Path(results).resolve():
        raise UsageError(f"the report would overwrite {page_path}; name another file for it")
    return page_path


async def _run(
    campaign: Campaign, shown: Shown, url: str | None, as_json: bool, *, embedded: bool
) -> None:
    from leanq.commands.silence import explain_silence
    from leanq.commands.submit import client_at, ends, queue_at

    started = time.monotonic()
    async with (
        queue_at(url, embedded=embedded) as (place, worker),
        client_at(place, no_worker="wait") as client,
    ):
        with shown:
            why = explain_silence(client.clusters, campaign.plan.options, lambda: shown.last.rows)
            async with beside(why):
                async for _ in ends(iter([campaign.run(client, shown)]), worker):
                    pass
    counts, wall_s = shown.last.counts, time.monotonic() - started
    if as_json:
        click.echo(json.dumps({"out": campaign.out, "counts": counts, "wall_s": round(wall_s, 3)}))
    else:
        click.echo(f"{campaign.out}: {counted(counts) or 'nothing'} in {wall_s:.1f} s")


def _campaign(data: str, out: str | None, **how: Any) -> Any:
    if out is None:
        raise UsageError(
            "name the file for the results, such as --out results.jsonl (or .parquet); by it, an "
            "interrupted campaign resumes"
        )
    from leanq.campaigns.campaign import Campaign
    from leanq.campaigns.coordinator import Plan
    from leanq.campaigns.dataset import fields_of

    given = {name: how.pop(f"{name}_field") for name in _FIELDS}
    given = {name: field for name, field in given.items() if field is not None}
    shape, no_target = how.pop("shape"), how.pop("no_target")
    if no_target and "target" in given:
        raise UsageError("--no-target and --target-field exclude one another")
    name, fields = fields_of(data, given, shape, target=not no_target)
    if name != "plain":
        meant = ((each, getattr(fields, each)) for each in _FIELDS)
        shown = ", ".join(f"{each} is {field!r}" for each, field in meant if field)
        no = "" if fields.target and fields.verified else "; nothing is verified"
        click.echo(f"leanq: {data} has the shape {name}: {shown}{no} (--shape plain)", err=True)
    replay = how.pop("replay")
    if replay is not None:
        check_name("the replay memory", replay)
    plan = {name: how.pop(name) for name in ("window", "first_success")}
    # A campaign that was begun without the option goes on without it.
    goals = {"goals": True} if how.pop("goals") else {}
    options: Any = {**how, **goals, "allow_axioms": list(how["allow_axioms"])}
    return Campaign(data, out, fields, Plan(options, **plan), replay)


def campaigns_at(url: str | None) -> contextlib.AbstractContextManager[Campaigns]:
    """Returns the campaigns that a command means; raises as :func:`.submitted_campaigns`."""
    return submitted_campaigns(_rq_url(url), _prefix())


def _rq_url(url: str | None) -> str:
    return os.environ.get("LEANQ_RQ_URL") or queue_url(url)


def _prefix() -> str:
    return check_name("LEANQ_PREFIX", os.environ.get("LEANQ_PREFIX", Settings.prefix))


def _line(status: CampaignStatus) -> str:
    of = "" if status.total is None else f" of {status.total:,}"
    counts = f"; {counted(status.counts)}" if status.counts else ""
    why = f" ({status.error})" if status.error and status.error != status.state else ""
    name = Path(status.campaign.data).name
    return f"{status.id}  {status.state}{why}  {name}: {status.rows:,}{of} rows{counts}"


def _record(status: CampaignStatus) -> dict[str, Any]:
    return {
        **asdict(status),
        "submitted_at": status.submitted_at.isoformat(),
        "starts_at": status.starts_at.isoformat() if status.starts_at else None,
    }
