"""``leanq campaign``: whole data sets, here and now or as jobs of RQ."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import redis

from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import End
from leanq.campaigns.rq_queue import Campaigns, CampaignStatus
from leanq.campaigns.rq_worker import work as work_for_rq
from leanq.client import AsyncLeanQClient
from leanq.commands.fleet import queue_url
from leanq.commands.progress import Shown, summary
from leanq.commands.submit import hint, interruptible, queue_at
from leanq.errors import UnavailableError, UsageError
from leanq.fleet.logging import log_to_stderr
from leanq.queue.settings import Settings, check_name, check_url, each_host
from leanq.queue.wire import LEAN_VERDICTS

_NO_CLUSTER = "RQ needs one Redis that is no cluster; name it with LEANQ_RQ_URL"


def run(campaign: Campaign, url: str | None, as_json: bool) -> int:
    """Runs a campaign to its end, or on from where it was left; the exit code."""
    try:
        counts = interruptible(_run(campaign, url, as_json))
    except KeyboardInterrupt:
        click.echo("leanq: stopped; the same command resumes it", err=True)
        raise
    # As of submit. What was stopped since a sibling had succeeded is no failure.
    kinds = {name for name, count in counts.items() if count} - {"echoed"}
    if campaign.plan.first_success:
        kinds -= {"cancelled"}
    if "error" in kinds:
        return 2
    return 3 if kinds - LEAN_VERDICTS else 1 if kinds - {"accepted"} else 0


async def _run(campaign: Campaign, url: str | None, as_json: bool) -> dict[str, int]:
    started = time.monotonic()
    async with queue_at(url) as (place, worker), AsyncLeanQClient(place) as client:
        idle = asyncio.create_task(hint(client.clusters, campaign.plan.options))
        with Shown(campaign.data, as_json) as shown:
            running: asyncio.Task[End] = asyncio.create_task(campaign.run(client, shown))
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
    counts, wall_s = dict(shown.last.counts), time.monotonic() - started
    if as_json:
        click.echo(json.dumps({"out": campaign.out, "counts": counts, "wall_s": round(wall_s, 3)}))
    else:
        click.echo(f"{campaign.out}: {summary(counts)} in {wall_s:.1f} s")
    return counts


def submit(
    campaign: Campaign,
    url: str | None,
    as_json: bool,
    delay_s: float | None,
    after: Sequence[str],
) -> None:
    """Sends a campaign to whichever ``leanq campaign worker`` is free."""
    # The worker has another working directory.
    data, out = os.path.abspath(campaign.data), os.path.abspath(campaign.out)
    if not os.path.exists(data):
        click.echo(f"leanq: {data} is not on this machine; it must be on the workers'", err=True)
    with _campaigns(url) as campaigns:
        id_ = campaigns.submit(
            replace(campaign, data=data, out=out), delay_s=delay_s or 0.0, after=after
        )
    click.echo(json.dumps({"id": id_}) if as_json else id_)


def show_all(url: str | None, as_json: bool) -> None:
    """The campaigns that RQ knows, the newest first."""
    with _campaigns(url) as campaigns:
        found = sorted(
            campaigns.list(),
            key=lambda each: each.submitted_at.timestamp(),
            reverse=True,
        )
    for each in found:
        click.echo(json.dumps(_record(each)) if as_json else _line(each))
    if not found and not as_json:
        click.echo("no campaigns")


def show(id_: str, url: str | None, as_json: bool) -> None:
    """One campaign in full."""
    with _campaigns(url) as campaigns:
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
        "checks": options,
        "window": plan.window,
        "bad rows": "\n".join(status.bad_rows),
        "warnings": "\n".join(status.warnings),
        "error": status.error or "",
    }
    for name, value in rows.items():
        if value:
            head, *more = str(value).splitlines()
            click.echo("\n".join([f"  {name:10} {head}", *(f"{'':13}{line}" for line in more)]))


def change(id_: str, url: str | None, as_json: bool, how: Callable[[Campaigns, str], None]) -> None:
    """Holds, ends or takes up a campaign, and prints what state it is in then."""
    with _campaigns(url) as campaigns:
        how(campaigns, id_)
        status = campaigns.show(id_)
    click.echo(json.dumps(_record(status)) if as_json else _line(status))


def work(url: str | None, as_json: bool, burst: bool) -> None:
    """Runs campaigns until told to stop."""
    log_to_stderr(as_json)
    # Campaigns are coordinated in processes of their own, which find the queue by this.
    os.environ["LEANQ_URL"] = named = queue_url(url)
    # Better now than in each campaign.
    AsyncLeanQClient(named)
    with _connected(url) as connection:
        work_for_rq(connection, _prefix(), burst=burst)


@contextlib.contextmanager
def _campaigns(url: str | None) -> Iterator[Campaigns]:
    with _connected(url) as connection:
        yield Campaigns(connection, _prefix())


@contextlib.contextmanager
def _connected(url: str | None) -> Iterator[redis.Redis]:
    """RQ's Redis: LEANQ_RQ_URL, or the queue's own where RQ can use that."""
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


def _line(status: CampaignStatus) -> str:
    of = "" if status.total is None else f" of {status.total:,}"
    told = f"; {summary(status.counts)}" if status.counts else ""
    why = f" ({status.error})" if status.error and status.error != status.state else ""
    name = Path(status.campaign.data).name
    return f"{status.id}  {status.state}{why}  {name}: {status.rows:,}{of} rows{told}"


def _record(status: CampaignStatus) -> dict[str, Any]:
    return {
        **asdict(status),
        "submitted_at": status.submitted_at.isoformat(),
        "starts_at": status.starts_at.isoformat() if status.starts_at else None,
    }
