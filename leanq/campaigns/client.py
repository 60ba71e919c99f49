"""A client's campaigns: ``lean.campaigns``, with the same methods through a gateway and over Redis.

Each call makes a connection of its own: they are few, and so a client that never asks for a
campaign has none, and one that was forked shares none.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from leanq.campaigns.coordinator import Plan
from leanq.campaigns.results import read_results
from leanq.campaigns.rq_connection import NO_CLUSTER, rq_url, submitted_campaigns
from leanq.campaigns.submitted import (
    SubmittedCampaign,
    report_on,
    results_of,
    submit_rows,
)
from leanq.errors import InvalidRequestError, UnavailableError, UsageError
from leanq.producer.gateway_route import problem_in, unavailable
from leanq.producer.gateway_url import Gateway
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT, Check
from leanq.queue.settings import Settings

if TYPE_CHECKING:
    from leanq.campaigns.rq_queue import Campaigns

Change = Literal["pause", "resume", "cancel", "retry"]

_T = TypeVar("_T")

Records = list[dict[str, Any]]
SubmittedCampaigns = list[SubmittedCampaign]

_CONNECT_S, _TIMEOUT_S = 10.0, 60.0


class CampaignRoute(Protocol):
    """How a client comes to campaigns. Its methods block, and raise as those of
    :class:`CampaignsClient`."""

    def submit(
        self, rows: bytes, options: Check, *, first_success: bool, request_id: str | None
    ) -> SubmittedCampaign:
        """Starts a campaign over JSON lines."""

    def list(self) -> SubmittedCampaigns:
        """Those that there are, in any order."""

    def show(self, id_: str) -> SubmittedCampaign:
        """One of them."""

    def change(self, id_: str, how: Change) -> SubmittedCampaign:
        """One of them, after it was changed."""

    def report(self, id_: str) -> dict[str, Any]:
        """The figures of a finished one."""

    def results(self, id_: str) -> Records:
        """The records of a finished one."""


class CampaignsClient:
    """The ``campaigns`` of a :class:`LeanQClient`: whole data sets, checked by the fleet's campaign
    workers, however long that takes and whatever becomes of this client.

    ::

        rows = [{"id": n, "code": code} for n, code in enumerate(codes)]
        campaign = lean.campaigns.submit(rows, env="mathlib")
        while not lean.campaigns.show(campaign.id).ended:
            time.sleep(10)
        verdicts = [record["verdict"] for record in lean.campaigns.results(campaign.id)]

    Through a gateway they are those of the key's tenant that came through gateways, and the gateway
    has to take campaigns. Over Redis they are all in RQ's Redis (``LEANQ_RQ_URL``, or the queue's),
    also those of ``leanq campaign submit``; that needs ``leanq[campaigns]``, and to submit, read
    results or report on them, the folder that campaign workers have at the same path.

    All methods wait for their answer, and raise UsageError for an unknown campaign or one whose
    state does not allow it, and UnavailableError where the gateway or RQ's Redis does not answer.
    """

    def __init__(self, route: CampaignRoute) -> None:
        self._route = route

    def submit(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        env: str | None = None,
        timeout_s: float = 60.0,
        priority: int = 2,
        first_success: bool = False,
        request_id: str | None = None,
    ) -> SubmittedCampaign:
        """Starts a campaign over rows.

        Where the answer is lost (UnavailableError) it may have started. With a ``request_id`` the
        same call again gives the campaign that there is; without, :meth:`list` shows it.

        Args:
            rows: each with ``id``, ``code`` (a text, or a list of attempts), and all or none with
                ``problem`` and ``target``, the theorems to prove. They are held in memory.
            env: the environment; over Redis ``default`` unless given, else the gateway's choice.
            timeout_s: CPU seconds for each text.
            priority: 0 before 1 before 2.
            first_success: whether a problem's other attempts are cancelled at its first success.
            request_id: a name of the caller's for it, 1 to 48 letters, digits and ``. _ -``: the
                same again is the same campaign, as long as RQ knows it.

        Raises:
            ConflictError: other rows or options were submitted by this ``request_id``.
            UsageError: rows or options that cannot be used; over Redis also where
                ``LEANQ_CAMPAIGNS`` names no folder to write them to.
            QueueFullError: the gateway takes no further campaign of this tenant's now.
        """
        options = Check(timeout_s=timeout_s, priority=priority)
        if env is not None:
            options["env"] = env
        return self._route.submit(
            _lines(rows), options, first_success=first_success, request_id=request_id
        )

    def list(self) -> SubmittedCampaigns:
        """All of them, the newest first."""
        return sorted(self._route.list(), key=lambda each: each.submitted_at, reverse=True)

    def show(self, id_: str) -> SubmittedCampaign:
        """One campaign, as it is now."""
        return self._route.show(id_)

    def pause(self, id_: str) -> SubmittedCampaign:
        """Pauses a campaign: its requests in flight are withdrawn, and what was done stays."""
        return self._route.change(id_, "pause")

    def resume(self, id_: str) -> SubmittedCampaign:
        """Lets a paused campaign go on."""
        return self._route.change(id_, "resume")

    def cancel(self, id_: str) -> SubmittedCampaign:
        """Ends a campaign, for good or until a retry; one that has ended stays as it is."""
        return self._route.change(id_, "cancel")

    def retry(self, id_: str) -> SubmittedCampaign:
        """Runs a campaign again: one that failed or was cancelled goes on where it was, and of a
        finished one those rows are checked again that have no verdict of Lean's."""
        return self._route.change(id_, "retry")

    def report(self, id_: str) -> dict[str, Any]:
        """A finished campaign's figures: verdicts, pass@k, times, what is slow or flaky."""
        return self._route.report(id_)

    def results(self, id_: str) -> Records:
        """A finished campaign's records, one for each row or for each of its texts."""
        return self._route.results(id_)


class AsyncCampaignsClient:
    """The ``campaigns`` of an :class:`AsyncLeanQClient`: those of :class:`CampaignsClient`, whose
    methods are awaited here."""

    def __init__(self, route: CampaignRoute) -> None:
        self._campaigns = CampaignsClient(route)

    async def submit(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        env: str | None = None,
        timeout_s: float = 60.0,
        priority: int = 2,
        first_success: bool = False,
        request_id: str | None = None,
    ) -> SubmittedCampaign:
        """Starts a campaign over rows; as :meth:`CampaignsClient.submit`."""
        how: dict[str, Any] = {"env": env, "timeout_s": timeout_s, "priority": priority}
        how |= {"first_success": first_success, "request_id": request_id}
        return await asyncio.to_thread(self._campaigns.submit, rows, **how)

    async def list(self) -> SubmittedCampaigns:
        """All of them; as :meth:`CampaignsClient.list`."""
        return await asyncio.to_thread(self._campaigns.list)

    async def show(self, id_: str) -> SubmittedCampaign:
        """One campaign; as :meth:`CampaignsClient.show`."""
        return await asyncio.to_thread(self._campaigns.show, id_)

    async def pause(self, id_: str) -> SubmittedCampaign:
        """Pauses a campaign; as :meth:`CampaignsClient.pause`."""
        return await asyncio.to_thread(self._campaigns.pause, id_)

    async def resume(self, id_: str) -> SubmittedCampaign:
        """Lets a paused campaign go on; as :meth:`CampaignsClient.resume`."""
        return await asyncio.to_thread(self._campaigns.resume, id_)

    async def cancel(self, id_: str) -> SubmittedCampaign:
        """Ends a campaign; as :meth:`CampaignsClient.cancel`."""
        return await asyncio.to_thread(self._campaigns.cancel, id_)

    async def retry(self, id_: str) -> SubmittedCampaign:
        """Runs a campaign again; as :meth:`CampaignsClient.retry`."""
        return await asyncio.to_thread(self._campaigns.retry, id_)

    async def report(self, id_: str) -> dict[str, Any]:
        """A finished campaign's figures; as :meth:`CampaignsClient.report`."""
        return await asyncio.to_thread(self._campaigns.report, id_)

    async def results(self, id_: str) -> Records:
        """A finished campaign's records; as :meth:`CampaignsClient.results`."""
        return await asyncio.to_thread(self._campaigns.results, id_)


class OverRedis:
    """The campaigns in RQ's Redis.

    Args:
        clusters: those of the client; RQ uses the only one, unless LEANQ_RQ_URL names another.
        tenant: the client's.
    """

    def __init__(self, clusters: Iterable[Settings], tenant: str) -> None:
        self._clusters = tuple(clusters)
        self._tenant = tenant

    def submit(
        self, rows: bytes, options: Check, *, first_success: bool, request_id: str | None
    ) -> SubmittedCampaign:
        named = os.environ.get("LEANQ_CAMPAIGNS")
        if not named:
            raise UsageError(
                "over Redis, rows go to campaign workers by a folder that this machine and theirs "
                "have at the same path: name it with LEANQ_CAMPAIGNS, or use a gateway"
            )
        shared: Check = {"env": DEFAULT_ENVIRONMENT, **options, "tenant": self._tenant}
        plan = Plan(shared, first_success=first_success)
        with self._campaigns() as campaigns:
            try:
                found, _ = submit_rows(campaigns, Path(named), rows, plan, request_id)
            except OSError as error:
                raise UsageError(f"LEANQ_CAMPAIGNS: {error.filename}: {error.strerror}") from None
            return SubmittedCampaign.of(found)

    def list(self) -> SubmittedCampaigns:
        with self._campaigns() as campaigns:
            return [SubmittedCampaign.of(each) for each in campaigns.list()]

    def show(self, id_: str) -> SubmittedCampaign:
        with self._campaigns() as campaigns:
            return SubmittedCampaign.of(campaigns.show(id_))

    def change(self, id_: str, how: Change) -> SubmittedCampaign:
        with self._campaigns() as campaigns:
            found = SubmittedCampaign.of(campaigns.show(id_))
            if how == "cancel" and found.ended:
                return found
            getattr(campaigns, how)(id_)
            return SubmittedCampaign.of(campaigns.show(id_))

    def report(self, id_: str) -> dict[str, Any]:
        return report_on(self._results(id_))

    def results(self, id_: str) -> Records:
        return [*read_results(str(self._results(id_)))]

    def _results(self, id_: str) -> Path:
        with self._campaigns() as campaigns:
            return results_of(campaigns.show(id_))

    def _campaigns(self) -> AbstractContextManager[Campaigns]:
        return submitted_campaigns(rq_url(self._only), self._clusters[0].prefix)

    def _only(self) -> str:
        if len(self._clusters) > 1:
            raise UsageError(NO_CLUSTER)
        return self._clusters[0].url


class OverHttp:
    """The campaigns of a gateway.

    Args:
        gateway: where it is, and the key for it.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def submit(
        self, rows: bytes, options: Check, *, first_success: bool, request_id: str | None
    ) -> SubmittedCampaign:
        how: dict[str, Any] = {**options, "first_success": first_success}
        if request_id is not None:
            how["request_id"] = request_id
        if "env" in how:
            how["environment"] = how.pop("env")
        headers = {"Content-Type": "application/x-ndjson"}
        return self._told("POST", params=how, content=rows, headers=headers)

    def list(self) -> SubmittedCampaigns:
        answer = self._asked("GET", "")
        return _read(answer, dict[Literal["campaigns"], SubmittedCampaigns])["campaigns"]

    def show(self, id_: str) -> SubmittedCampaign:
        return self._told("GET", _path(id_))

    def change(self, id_: str, how: Change) -> SubmittedCampaign:
        if how == "cancel":
            return self._told("DELETE", _path(id_))
        return self._told("POST", f"{_path(id_)}/{how}")

    def report(self, id_: str) -> dict[str, Any]:
        return _read(self._asked("GET", f"{_path(id_)}/report"), dict[str, Any])

    def results(self, id_: str) -> Records:
        answer = self._asked("GET", f"{_path(id_)}/results")
        try:
            return [json.loads(line) for line in answer.content.splitlines()]
        except ValueError:
            raise _unreadable() from None

    def _told(self, method: str, path: str = "", **how: Any) -> SubmittedCampaign:
        return _read(self._asked(method, path, **how), SubmittedCampaign)

    def _asked(self, method: str, path: str, **how: Any) -> httpx2.Response:
        key = self._gateway.key
        headers = how.pop("headers", {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            with httpx2.Client(
                base_url=self._gateway.url,
                timeout=httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_S),
            ) as http:
                answer = http.request(method, f"/v1/campaigns{path}", headers=headers, **how)
        except httpx2.TransportError as error:
            raise unavailable(error) from None
        if not answer.is_success:
            raise problem_in(answer)
        return answer


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


def _path(id_: str) -> str:
    # What is no id of a campaign is none of the gateway's other paths, either.
    return f"/{quote(id_, safe='')}"


def _read(answer: httpx2.Response, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _unreadable() from None


def _unreadable() -> UnavailableError:
    return UnavailableError("what answers in the gateway's place is none, or of another release")
