"""A client's campaigns in RQ's Redis, ``lean.campaigns``.

Each call makes a connection of its own. Calls are few, and a client that was forked shares no
connection.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from leanq.campaigns.coordinator import Plan
from leanq.campaigns.results import read_results
from leanq.campaigns.rq_connection import NO_CLUSTER, submitted_campaigns
from leanq.campaigns.submitted import (
    Change,
    SubmittedCampaign,
    changed,
    report_on,
    results_of,
    submit_rows,
)
from leanq.errors import InvalidRequestError, UsageError
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT, Check
from leanq.queue.settings import Settings

if TYPE_CHECKING:
    from leanq.campaigns.rq_queue import Campaigns

_P = ParamSpec("_P")
_T = TypeVar("_T")

Records = list[dict[str, Any]]
SubmittedCampaigns = list[SubmittedCampaign]

_CONNECT_S, _TIMEOUT_S = 10.0, 60.0


class CampaignsClient:
    """The ``campaigns`` of a ``LeanQClient``: whole data sets that the fleet's campaign
    workers check. They go on when this client ends.

        rows = [{"id": n, "code": code} for n, code in enumerate(codes)]
        campaign = lean.campaigns.submit(rows, env="mathlib")
        while not lean.campaigns.show(campaign.id).ended:
            time.sleep(10)
        verdicts = [record["verdict"] for record in lean.campaigns.results(campaign.id)]

    They are all campaigns in RQ's Redis (``LEANQ_RQ_URL``, or the queue's), those of ``leanq
    campaign submit`` included. That needs ``leanq[campaigns]``. To submit, and to read results or
    reports, it also needs the campaign workers' folder at the same path.

    All methods wait for their answer. They raise UsageError for an unknown campaign or one whose
    state does not allow the call, and UnavailableError if RQ's Redis does not answer.
    """

    def __init__(self, clusters: Iterable[Settings], tenant: str) -> None:
        self._clusters = tuple(clusters)
        self._tenant = tenant

    def submit(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        env: str = DEFAULT_ENVIRONMENT,
        timeout_s: float = 60.0,
        priority: int = 2,
        first_success: bool = False,
        request_id: str | None = None,
    ) -> SubmittedCampaign:
        """Starts a campaign over rows.

        If the answer is lost (UnavailableError), the campaign may have started. With a
        ``request_id``, the same call returns that campaign; otherwise look for it with
        ``list``.

        Args:
            rows: each with ``id`` and ``code`` (a text, or a list of attempts); all of them or none
                with ``problem``, and with ``target``, the theorems to prove. They are held in
                memory.
            env: the environment.
            timeout_s: CPU seconds for each text.
            priority: 0 is the most urgent, 2 the least.
            first_success: whether a problem's other attempts are cancelled at its first success.
            request_id: the caller's name for the campaign: 1 to 48 letters, digits and ``. _ -``.
                As long as RQ knows the campaign, the same name means the same campaign.

        Raises:
            ConflictError: other rows or options came with this ``request_id``.
            UsageError: rows or options cannot be used, or ``LEANQ_CAMPAIGNS`` names no folder for
                them.
        """
        lines = _lines(rows)
        named = os.environ.get("LEANQ_CAMPAIGNS")
        if not named:
            raise UsageError(
                "rows go to campaign workers by a folder that this machine and theirs have at the "
                "same path: name it with LEANQ_CAMPAIGNS"
            )
        options = Check(env=env, timeout_s=timeout_s, priority=priority, tenant=self._tenant)
        plan = Plan(options, first_success=first_success)
        with self._campaigns() as campaigns:
            try:
                found = submit_rows(campaigns, Path(named), lines, plan, request_id)
            except OSError as error:
                raise UsageError(f"LEANQ_CAMPAIGNS: {error.filename}: {error.strerror}") from None
            return found.shown()

    def list(self) -> SubmittedCampaigns:
        """Returns all campaigns, the newest first."""
        with self._campaigns() as campaigns:
            found = [each.shown() for each in campaigns.list()]
        return sorted(found, key=lambda each: each.submitted_at, reverse=True)

    def show(self, id_: str) -> SubmittedCampaign:
        """Returns one campaign as it is now."""
        with self._campaigns() as campaigns:
            return campaigns.show(id_).shown()

    def pause(self, id_: str) -> SubmittedCampaign:
        """Pauses a campaign: withdraws its requests in flight, and keeps its records."""
        return self._change(id_, "pause")

    def resume(self, id_: str) -> SubmittedCampaign:
        """Resumes a paused campaign."""
        return self._change(id_, "resume")

    def cancel(self, id_: str) -> SubmittedCampaign:
        """Ends a campaign until it is retried; an ended one stays as it is."""
        return self._change(id_, "cancel")

    def retry(self, id_: str) -> SubmittedCampaign:
        """Runs a campaign again. One that failed or was cancelled resumes; a finished one checks
        those rows again that have no verdict of Lean's."""
        return self._change(id_, "retry")

    def report(self, id_: str) -> dict[str, Any]:
        """Returns a finished campaign's figures: verdicts, pass@k, times, slow and flaky texts."""
        return report_on(self._results(id_))

    def results(self, id_: str) -> Records:
        """Returns a finished campaign's records, one for each row or for each of its texts."""
        return [*read_results(str(self._results(id_)))]

    def _change(self, id_: str, how: Change) -> SubmittedCampaign:
        with self._campaigns() as campaigns:
            return changed(campaigns, id_, how).shown()

    def _results(self, id_: str) -> Path:
        with self._campaigns() as campaigns:
            return results_of(campaigns.show(id_))

    def _campaigns(self) -> AbstractContextManager[Campaigns]:
        first, *others = self._clusters
        named = os.environ.get("LEANQ_RQ_URL")
        if others and not named:
            raise UsageError(NO_CLUSTER)
        return submitted_campaigns(named or first.url, first.prefix)


def _awaited(
    method: Callable[Concatenate[CampaignsClient, _P], _T],
) -> Callable[Concatenate[AsyncCampaignsClient, _P], Coroutine[Any, Any, _T]]:
    """Returns the method as a coroutine function, which runs it in a thread."""

    @functools.wraps(method)
    async def call(self: AsyncCampaignsClient, /, *args: _P.args, **how: _P.kwargs) -> _T:
        return await asyncio.to_thread(method, self.blocking, *args, **how)

    return call


class AsyncCampaignsClient:
    """The ``campaigns`` of an ``AsyncLeanQClient``: the methods of ``blocking``, to await."""

    def __init__(self, blocking: CampaignsClient) -> None:
        self.blocking = blocking

    submit = _awaited(CampaignsClient.submit)
    list = _awaited(CampaignsClient.list)
    show = _awaited(CampaignsClient.show)
    pause = _awaited(CampaignsClient.pause)
    resume = _awaited(CampaignsClient.resume)
    cancel = _awaited(CampaignsClient.cancel)
    retry = _awaited(CampaignsClient.retry)
    report = _awaited(CampaignsClient.report)
    results = _awaited(CampaignsClient.results)


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"expected a mapping, got {type(row).__name__}")
            lines.append(json.dumps({**row}))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"row {number} cannot be sent as JSON: {error}") from None
    return "\n".join(lines).encode()
