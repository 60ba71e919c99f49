"""The job that RQ runs for a campaign: a coordinator, in a process that may die at any moment."""

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
from leanq.campaigns.coordinator import Command, Progress
from leanq.campaigns.dataset import open_data
from leanq.campaigns.journal import BusyError, Journal, kind
from leanq.campaigns.results import read_results
from leanq.campaigns.rq_queue import RETRIES, CampaignError, note, noted
from leanq.client import AsyncLeanQClient
from leanq.errors import LeanQError, UsageError

log = logging.getLogger("leanq.campaign")

_BUSY_RETRY_S, _RETRY_S, _FOREVER_S = 3, 10, 10 * 365 * 86_400
_BAD_SHOWN = 20


def coordinate(spec: dict[str, Any]) -> dict[str, int] | rq.Retry:
    """Coordinates a campaign in the queue at LEANQ_URL, from where its journal is; its records."""
    job = rq.get_current_job()
    assert job is not None
    reporter = _Reporter(job)
    log.info("%s: begins or goes on", job.id)
    try:
        command = asyncio.run(_run(Campaign.of(spec), reporter))
    except BusyError as error:
        # Whoever was taken for dead is not, or not yet.
        return reporter.again(_BUSY_RETRY_S, error=str(error))
    except UsageError as error:
        return reporter.end(str(error))
    except LeanQError as error:
        return reporter.again(_RETRY_S, error=str(error))
    if command == "cancel":
        return reporter.end("cancelled")
    if command == "pause":
        # Unless somebody has resumed it meanwhile. Those that wait for it to finish go on waiting.
        held = reporter.command() == "pause"
        return reporter.again(_FOREVER_S if held else _BUSY_RETRY_S, paused=held)
    log.info("%s: finished", job.id)
    return reporter.counts


async def _run(campaign: Campaign, reporter: _Reporter) -> Command:
    if (command := reporter.command()) != "go on":
        return command
    retry, begun = bool(reporter.noted("retry")), reporter.noted("begun")
    whole = Journal.is_whole(campaign.out)
    if begun and not retry and whole:
        # Its last coordinator died before it could say so.
        reporter.counts = dict(Counter(map(kind, read_results(campaign.out))))
        return "go on"
    reporter.data = open_data(campaign.data, campaign.fields).fingerprint
    if begun and whole and begun != reporter.data:
        raise UsageError(f"{campaign.data} is no longer what {campaign.out} is of")
    async with AsyncLeanQClient(os.environ["LEANQ_URL"]) as client:
        # Results that were there before it began are somebody else's.
        return await campaign.run(client, reporter, retry=retry and bool(begun))


class _Reporter:
    """Writes in the job's meta how far the campaign is, and reads what it is to do."""

    def __init__(self, job: Job) -> None:
        self.counts: dict[str, int] = {}
        self.data = ""
        self._job = job
        self._begun = False
        job.meta = {name: job.meta[name] for name in ("progress", "bad") if name in job.meta}

    async def look(self, progress: Progress) -> Command:
        self.counts = dict(progress.counts)
        shown = {"rows": progress.rows, "total": progress.total, "counts": self.counts}
        try:
            return await asyncio.to_thread(self._report, shown)
        except redis.RedisError as error:
            # The queue's own server decides whether the campaign can go on.
            log.warning("RQ's server: %s", error)
            return "go on"

    def bad(self, line: int, error: str) -> None:
        bad = self._job.meta.setdefault("bad", [])
        text = f"line {line}: {error}"
        # Whoever goes on, or takes it up again, comes past it as well.
        if len(bad) < _BAD_SHOWN and text not in bad:
            log.warning("%s: %s", self._job.id, text)
            bad.append(text)

    def command(self) -> Command:
        told = self.noted("command")
        return "pause" if told == "pause" else "cancel" if told == "cancel" else "go on"

    def noted(self, name: str) -> str:
        return noted(self._job, name)

    def again(self, delay_s: int, **said: Any) -> rq.Retry:
        """The job goes back to RQ, to be run after ``delay_s`` seconds."""
        log.info("%s: %s", self._job.id, said.get("error", "paused"))
        self._job.meta |= said
        self._job.save_meta()
        return rq.Retry(max=RETRIES, interval=delay_s)

    def end(self, error: str) -> dict[str, int]:
        """The job fails, and would again."""
        self._job.meta["error"] = error
        with contextlib.suppress(redis.RedisError):
            self._job.save_meta()
        self._job.retries_left = 0
        raise CampaignError(error)

    def _report(self, progress: dict[str, Any]) -> Command:
        if not self._begun:
            # From now on results that are there are its own.
            note(self._job, begun=self.data, retry="")
            self._begun = True
        self._job.meta["progress"] = progress
        self._job.save_meta()
        return self.command()
