"""RQ's job for a campaign: a coordinator, in a process that may die at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from typing import Any

import redis
import rq
from rq.job import Job

from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import Command, End, Progress
from leanq.campaigns.dataset import open_dataset
from leanq.campaigns.journal import BusyError, Journal, kind
from leanq.campaigns.results import read_results
from leanq.campaigns.rq_queue import (
    DIGEST,
    RETRIES,
    CampaignError,
    read_control,
    write_control,
)
from leanq.client import AsyncLeanQClient
from leanq.errors import LeanQError, UsageError
from leanq.fleet import tracing

log = logging.getLogger("leanq.campaign")

_BUSY_RETRY_S, _RETRY_S = 3, 10
# A paused campaign is a job scheduled for a distant day, so that its dependents keep waiting.
_PAUSED_S = 10 * 365 * 86_400
_BAD_ROWS_KEPT = 20


def coordinate(spec: dict[str, Any]) -> dict[str, int] | rq.Retry:
    """Runs or resumes a campaign in the queue at LEANQ_URL.

    Returns records by ``journal.kind`` if the campaign has finished; otherwise RQ's order to
    run the job again. Raises CampaignError if it was cancelled, or would fail again.
    """
    job = rq.get_current_job()
    assert job is not None
    reporter = _Reporter(job)
    log.info("%s: starts", job.id)
    try:
        end = asyncio.run(_run(Campaign.of(spec), reporter))
    except BusyError as error:
        # RQ took a living coordinator for dead.
        return reporter.requeue(_BUSY_RETRY_S, error=str(error))
    except UsageError as error:
        return reporter.fail(str(error))
    except LeanQError as error:
        return reporter.requeue(_RETRY_S, error=str(error))
    finally:
        # RQ ends this process at once.
        tracing.flush()
    if end == "cancelled":
        return reporter.fail("cancelled")
    if end == "paused":
        # A user may have resumed it since.
        paused = reporter.command() == "pause"
        return reporter.requeue(_PAUSED_S if paused else _BUSY_RETRY_S, paused=paused)
    log.info("%s: finished", job.id)
    return reporter.counts


async def _run(campaign: Campaign, reporter: _Reporter) -> End:
    command = reporter.command()
    if command != "run":
        return "paused" if command == "pause" else "cancelled"
    retry, started_with = bool(reporter.control("retry")), reporter.control("started_with")
    whole = Journal.is_whole(campaign.out)
    if started_with and not retry and whole:
        # The last coordinator died between writing the results and reporting them.
        reporter.counts = dict(Counter(map(kind, read_results(campaign.out))))
        return "finished"
    reporter.fingerprint = open_dataset(campaign.data, campaign.fields).fingerprint
    # Not only if they are whole: a retry may have died before it kept any of their records.
    is_there = os.path.exists(campaign.out)
    if started_with and is_there and started_with != reporter.fingerprint:
        raise UsageError(
            f"{campaign.data} has changed since {campaign.out} was written; "
            "submit a new campaign for it"
        )
    async with AsyncLeanQClient(os.environ["LEANQ_URL"]) as client:
        # Results from before the campaign's start are not its own.
        retry = retry and bool(started_with)
        return await campaign.run(client, reporter, retry=retry, name=reporter.id)


class _Reporter:
    """Writes the campaign's progress into the job's meta, and reads the user's commands."""

    def __init__(self, job: Job) -> None:
        self.counts: dict[str, int] = {}
        self.fingerprint = ""
        self.id = job.id
        self._job = job
        self._started = False
        kept = ("progress", "bad_rows", "warnings", DIGEST)
        job.meta = {name: job.meta[name] for name in kept if name in job.meta}

    def resumes(self, text: str) -> None:
        log.info("%s: resumes: %s", self._job.id, text)
        self._job.meta["resumed"] = text

    async def update(self, progress: Progress) -> Command:
        self.counts = dict(progress.counts)
        shown = {"rows": progress.rows, "total": progress.total, "counts": self.counts}
        try:
            return await asyncio.to_thread(self._report, shown)
        except redis.RedisError as error:
            # The campaign depends on the queue's server alone.
            log.warning("RQ's server: %s", error)
            return "run"

    def bad_row(self, line: int, error: str) -> None:
        self._keep("bad_rows", f"line {line}: {error}")

    def warn(self, text: str) -> None:
        self._keep("warnings", text)

    def command(self) -> Command:
        command = self.control("command")
        return "pause" if command == "pause" else "cancel" if command == "cancel" else "run"

    def control(self, name: str) -> str:
        return read_control(self._job, name)

    def requeue(self, delay_s: int, **meta: Any) -> rq.Retry:
        log.info("%s: %s", self._job.id, meta.get("error", "paused"))
        self._job.meta |= meta
        self._job.save_meta()
        return rq.Retry(max=RETRIES, interval=delay_s)

    def fail(self, error: str) -> dict[str, int]:
        """Makes the job fail for good; raises CampaignError."""
        self._job.meta["error"] = error
        with contextlib.suppress(redis.RedisError):
            self._job.save_meta()
        self._job.retries_left = 0
        raise CampaignError(error)

    def _report(self, progress: dict[str, Any]) -> Command:
        if not self._started:
            # From now on, results at the path are the campaign's own.
            write_control(self._job, started_with=self.fingerprint, retry="")
            self._started = True
        self._job.meta["progress"] = progress
        self._job.save_meta()
        return self.command()

    def _keep(self, name: str, text: str) -> None:
        kept = self._job.meta.setdefault(name, [])
        # A coordinator that resumes the campaign meets the same rows again.
        if len(kept) < _BAD_ROWS_KEPT and text not in kept:
            log.warning("%s: %s", self._job.id, text)
            kept.append(text)
