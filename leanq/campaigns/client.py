"""A client's campaigns: ``lean.campaigns`` has the same methods through a gateway and over Redis.

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
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

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
from leanq.errors import InvalidRequestError, UnavailableError, UsageError
from leanq.producer.destination import Gateway
from leanq.producer.gateway_route import problem_in, unavailable
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
    """The ``campaigns`` of a :class:`LeanQClient`: whole data sets that the fleet's campaign
    workers check. They go on when this client ends.

    ::

        rows = [{"id": n, "code": code} for n, code in enumerate(codes)]
        campaign = lean.campaigns.submit(rows, env="mathlib")
        while not lean.campaigns.show(campaign.id).ended:
            time.sleep(10)
        verdicts = [record["verdict"] for record in lean.campaigns.results(campaign.id)]

    Through a gateway that takes campaigns, these are the campaigns of the key's tenant that came
    through gateways. Over Redis they are all campaigns in RQ's Redis (``LEANQ_RQ_URL``, or the
    queue's), those of ``leanq campaign submit`` included. That needs ``leanq[campaigns]``. To
    submit, and to read results or reports, it also needs the campaign workers' folder at the same
    path.

    All methods wait for their answer. They raise UsageError for an unknown campaign or one whose
    state does not allow the call, and UnavailableError if the gateway or RQ's Redis does not
    answer.
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

        If the answer is lost (UnavailableError), the campaign may have started. With a
        ``request_id``, the same call returns that campaign; otherwise look for it with
        :meth:`list`.

        Args:
            rows: each with ``id`` and ``code`` (a text, or a list of attempts); all of them or none
                with ``problem``, and with ``target``, the theorems to prove. They are held in
                memory.
            env: the environment; unless given, ``default`` over Redis, and the gateway's choice
                through a gateway.
            timeout_s: CPU seconds for each text.
            priority: 0 is the most urgent, 2 the least.
            first_success: whether a problem's other attempts are cancelled at its first success.
            request_id: the caller's name for the campaign: 1 to 48 letters, digits and ``. _ -``.
                As long as RQ knows the campaign, the same name means the same campaign.

        Raises:
            ConflictError: other rows or options came with this ``request_id``.
            UsageError: rows or options cannot be used; over Redis also if ``LEANQ_CAMPAIGNS`` names
                no folder for them.
            QueueFullError: the gateway takes no further campaign of this tenant now.
        """
        options = Check(timeout_s=timeout_s, priority=priority)
        if env is not None:
            options["env"] = env
        return self._route.submit(
            _lines(rows), options, first_success=first_success, request_id=request_id
        )

    def list(self) -> SubmittedCampaigns:
        """Returns all campaigns, the newest first."""
        return sorted(self._route.list(), key=lambda each: each.submitted_at, reverse=True)

    def show(self, id_: str) -> SubmittedCampaign:
        """Returns one campaign as it is now."""
        return self._route.show(id_)

    def pause(self, id_: str) -> SubmittedCampaign:
        """Pauses a campaign: withdraws its requests in flight, and keeps its records."""
        return self._route.change(id_, "pause")

    def resume(self, id_: str) -> SubmittedCampaign:
        """Resumes a paused campaign."""
        return self._route.change(id_, "resume")

    def cancel(self, id_: str) -> SubmittedCampaign:
        """Ends a campaign until it is retried; an ended one stays as it is."""
        return self._route.change(id_, "cancel")

    def retry(self, id_: str) -> SubmittedCampaign:
        """Runs a campaign again. One that failed or was cancelled resumes; a finished one checks
        those rows again that have no verdict of Lean's."""
        return self._route.change(id_, "retry")

    def report(self, id_: str) -> dict[str, Any]:
        """Returns a finished campaign's figures: verdicts, pass@k, times, slow and flaky texts."""
        return self._route.report(id_)

    def results(self, id_: str) -> Records:
        """Returns a finished campaign's records, one for each row or for each of its texts."""
        return self._route.results(id_)


def _awaited(
    method: Callable[Concatenate[CampaignsClient, _P], _T],
) -> Callable[Concatenate[AsyncCampaignsClient, _P], Coroutine[Any, Any, _T]]:
    """Returns the method as a coroutine function, which runs it in a thread."""

    @functools.wraps(method)
    async def call(self: AsyncCampaignsClient, /, *args: _P.args, **how: _P.kwargs) -> _T:
        return await asyncio.to_thread(method, self.blocking, *args, **how)

    return call


class AsyncCampaignsClient:
    """The ``campaigns`` of an :class:`AsyncLeanQClient`: the methods of ``blocking``, to await."""

    def __init__(self, route: CampaignRoute) -> None:
        self.blocking = CampaignsClient(route)

    submit = _awaited(CampaignsClient.submit)
    list = _awaited(CampaignsClient.list)
    show = _awaited(CampaignsClient.show)
    pause = _awaited(CampaignsClient.pause)
    resume = _awaited(CampaignsClient.resume)
    cancel = _awaited(CampaignsClient.cancel)
    retry = _awaited(CampaignsClient.retry)
    report = _awaited(CampaignsClient.report)
    results = _awaited(CampaignsClient.results)


class OverRedis:
    """The campaigns in RQ's Redis: LEANQ_RQ_URL, or the client's if it has one cluster alone."""

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
            return found.shown()

    def list(self) -> SubmittedCampaigns:
        with self._campaigns() as campaigns:
            return [each.shown() for each in campaigns.list()]

    def show(self, id_: str) -> SubmittedCampaign:
        with self._campaigns() as campaigns:
            return campaigns.show(id_).shown()

    def change(self, id_: str, how: Change) -> SubmittedCampaign:
        with self._campaigns() as campaigns:
            return changed(campaigns, id_, how).shown()

    def report(self, id_: str) -> dict[str, Any]:
        return report_on(self._results(id_))

    def results(self, id_: str) -> Records:
        return [*read_results(str(self._results(id_)))]

    def _results(self, id_: str) -> Path:
        with self._campaigns() as campaigns:
            return results_of(campaigns.show(id_))

    def _campaigns(self) -> AbstractContextManager[Campaigns]:
        first, *others = self._clusters
        named = os.environ.get("LEANQ_RQ_URL")
        if others and not named:
            raise UsageError(NO_CLUSTER)
        return submitted_campaigns(named or first.url, first.prefix)


class OverHttp:
    """The campaigns of a gateway."""

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
            raise unavailable(self._gateway.url, error) from None
        if not answer.is_success:
            raise problem_in(answer)
        return answer


CampaignRoute = OverRedis | OverHttp
"""The way from a client to campaigns. Its methods block, and raise as those of
:class:`CampaignsClient` do."""


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
    # Quoted whole, an id cannot lead to another path of the gateway.
    return f"/{quote(id_, safe='')}"


def _read(answer: httpx2.Response, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _unreadable() from None


def _unreadable() -> UnavailableError:
    return UnavailableError("the answer is not a gateway's, or is of another release")
