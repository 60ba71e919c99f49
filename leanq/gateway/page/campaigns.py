"""Campaigns, as RQ knows them; without RQ there are none.

RQ waits for Redis, so its calls run in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanq.campaigns.report.figures import summarise
from leanq.campaigns.report.outcomes import outcomes
from leanq.campaigns.report.sections import Section, sections
from leanq.campaigns.results import read_results
from leanq.campaigns.rq_connection import require_rq, submitted_campaigns
from leanq.errors import LeanQError, UsageError
from leanq.queue.settings import Settings

if TYPE_CHECKING:
    from leanq.campaigns.rq_queue import CampaignStatus

log = logging.getLogger("leanq.gateway")

_EVERY_S = 6.0
_FIRST_LOOK_S = 5.0
_MOST = 100
_MOST_CHANGES = 100


class CampaignBoard:
    """The campaigns in RQ's Redis: the queue's, unless ``url`` names another."""

    def __init__(self, settings: Settings, url: str | None) -> None:
        self._prefix = settings.prefix
        self._url = url or settings.url
        self._due_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._reporting = asyncio.Lock()
        self.rows: Sequence[CampaignStatus] = ()
        self.trouble = ""
        # The package to install before there can be campaigns.
        self.missing = ""

    async def refresh(self) -> None:
        """Starts a look if the last one is some seconds old. Only the first caller waits for it."""
        before = self._looking
        if before is None or (before.done() and time.monotonic() >= self._due_s):
            self._due_s = time.monotonic() + _EVERY_S
            self._looking = asyncio.create_task(self._look())
            if before is None:
                await asyncio.wait({self._looking}, timeout=_FIRST_LOOK_S)

    async def report(self, status: CampaignStatus) -> list[Section]:
        """Returns the report on a campaign's results; raises UsageError if they are not here."""
        # A report reads all results, so make one at a time.
        async with self._reporting:
            return await asyncio.to_thread(_report, status.campaign.out)

    async def _look(self) -> None:
        try:
            require_rq()
        except UsageError as error:
            self.missing = str(error)
            return
        try:
            self.rows, self.trouble = await asyncio.to_thread(self._rows), ""
        except (LeanQError, ValueError) as error:
            log.warning("the page's campaigns: %s", error)
            self.trouble = "RQ's Redis did not tell; the gateway's log says why"

    def _rows(self) -> list[CampaignStatus]:
        with submitted_campaigns(self._url, self._prefix) as campaigns:
            return sorted(campaigns.list(), key=lambda row: row.submitted_at, reverse=True)[:_MOST]


def _report(path: str) -> list[Section]:
    if not os.path.isfile(path):
        raise UsageError(
            "the results are not on the gateway's machine, or not complete yet: they are at "
            f"{path} where the campaign's worker runs; 'leanq campaign report' reads them there"
        )
    return list(sections(summarise(outcomes(read_results(path), path)), None, None, _MOST_CHANGES))
