"""Campaigns over HTTP: whole data sets, sent as rows, run by ``leanq campaign worker``.

The gateway writes the rows to a folder that the campaign workers have at the same path, and sends
RQ a campaign whose results go beside them. A tenant's campaigns are those whose data lies in the
tenant's own folder, so no id leads to another tenant's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
import redis
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse

from leanq.campaigns.coordinator import Plan
from leanq.campaigns.submitted import (
    SubmittedCampaign,
    folder_of,
    report_on,
    results_of,
    submit_rows,
)
from leanq.errors import UnavailableError, UsageError
from leanq.gateway.access import Submitter
from leanq.gateway.interface import access_of, lean_of
from leanq.producer.request_builder import Check

if TYPE_CHECKING:
    from leanq.campaigns.rq_queue import Campaigns, CampaignStatus
    from leanq.gateway.keys import Key

_T = TypeVar("_T")

Change = Literal["pause", "resume", "retry"]

_MOST_UNFINISHED = 16
_WINDOW = 1000
# Nothing removes the files of campaigns, and a tenant can start and end any number.
_FOLDER_BYTES = 4 << 30
_ENDED = frozenset({"finished", "failed", "cancelled"})

_EXAMPLE = (
    '{"id": 1, "code": "theorem t (p : Prop) (h : p) : p := h"}\n'
    '{"id": 2, "code": "theorem t (p : Prop) : p := sorry"}\n'
)

router = APIRouter(prefix="/campaigns", tags=["Campaigns"])


class TenantCampaigns:
    """The campaigns that came over HTTP. Its methods block, and belong into a thread.

    Args:
        campaigns: those of RQ.
        folder: where rows and results lie, for the campaign workers too.
    """

    def __init__(self, campaigns: Campaigns, folder: Path) -> None:
        self._campaigns = campaigns
        self._folder = folder

    def start(
        self,
        key: Key,
        rows: bytes,
        options: Check,
        request_id: str | None,
        *,
        first_success: bool,
    ) -> tuple[CampaignStatus, bool]:
        """Writes the rows and submits the campaign, unless it was by this ``request_id``.

        Returns:
            The campaign, and whether it is new.

        Raises:
            ConflictError: other rows or options were submitted by the ``request_id``.
            UsageError: the rows are none, or the options wrong.
            HTTPException: 429, too many of the tenant's have not ended; 413, its files are too
                large together.
        """
        plan = Plan(
            {**options, "tenant": key.tenant},
            window=min(_WINDOW, key.outstanding),
            first_success=first_success,
        )

        def check_room(folder: Path) -> None:
            self._check_room(key)
            if _bytes_in(folder) + len(rows) > _FOLDER_BYTES:
                raise HTTPException(
                    413,
                    f"the tenant's campaigns take the {_FOLDER_BYTES >> 30} GiB that they may; the "
                    "operator of the gateway has to remove old ones",
                )

        return submit_rows(
            self._campaigns, self._folder, rows, plan, request_id, check_room=check_room
        )

    def all_of(self, key: Key) -> list[CampaignStatus]:
        """Those of the key's tenant, the newest first."""
        own = (each for each in self._campaigns.list() if self._is_own(key, each))
        return sorted(own, key=lambda each: each.submitted_at, reverse=True)

    def show(self, key: Key, id_: str) -> CampaignStatus:
        """One of the tenant's.

        Raises:
            HTTPException: 404, the tenant has no such campaign.
        """
        try:
            found = self._campaigns.show(id_)
        except UsageError:
            found = None
        if found is None or not self._is_own(key, found):
            raise HTTPException(404, f"there is no campaign {id_!r:.80} of this key's tenant")
        return found

    def _check_room(self, key: Key) -> None:
        unfinished = [each for each in self.all_of(key) if each.state not in _ENDED]
        if len(unfinished) >= _MOST_UNFINISHED:
            raise HTTPException(
                429,
                f"{len(unfinished)} campaigns of the tenant have not ended; end one, or wait",
                {"Retry-After": "60"},
            )

    def change(self, key: Key, id_: str, how: Change) -> CampaignStatus:
        """Pauses, resumes or retries one of the tenant's.

        Raises:
            HTTPException: 404, as of :meth:`show`; 409, its state does not allow it; 429, a retry,
                and too many of the tenant's have not ended.
        """
        self.show(key, id_)
        if how == "retry":
            self._check_room(key)
        change = {
            "pause": self._campaigns.pause,
            "resume": self._campaigns.resume,
            "retry": self._campaigns.retry,
        }[how]
        try:
            change(id_)
        except UsageError as error:
            raise HTTPException(409, str(error)) from None
        return self.show(key, id_)

    def end(self, key: Key, id_: str) -> CampaignStatus:
        """Ends one of the tenant's, unless it has ended."""
        if self.show(key, id_).state not in _ENDED:
            self._campaigns.cancel(id_)
        return self.show(key, id_)

    def results(self, key: Key, id_: str) -> Path:
        """The file of its results.

        Raises:
            HTTPException: 404, as of :meth:`show`; 409, it has none.
        """
        found = self.show(key, id_)
        try:
            return results_of(found)
        except UsageError as error:
            raise HTTPException(409, str(error)) from None

    def report(self, key: Key, id_: str) -> dict[str, Any]:
        """The figures of its report; raises as :meth:`results`."""
        return report_on(self.results(key, id_))

    def _is_own(self, key: Key, status: CampaignStatus) -> bool:
        return Path(status.campaign.data).parent == folder_of(self._folder, key.tenant)


def _bytes_in(folder: Path) -> int:
    """What the files of a folder take; files come and go while this reads."""
    taken = 0
    with contextlib.suppress(FileNotFoundError):
        for each in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                taken += each.stat().st_size
    return taken


async def _done(request: Request, work: Callable[[TenantCampaigns], _T]) -> _T:
    campaigns = cast("TenantCampaigns | None", request.app.state.campaigns)
    if campaigns is None:
        raise HTTPException(
            404, "this gateway takes no campaigns; it was started without --campaigns"
        )
    try:
        return await asyncio.to_thread(work, campaigns)
    except redis.RedisError as error:
        raise UnavailableError(f"RQ's Redis: {error}") from None


def _json(content: Any, **how: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", **how)


@router.post(
    "",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "description": "A row a line: `id`, `code` or a list of them, and for all rows or none "
            "`problem` and `target`",
            "content": {
                "application/x-ndjson": {"schema": {"type": "string"}, "example": _EXAMPLE}
            },
            "required": True,
        }
    },
    responses={
        200: {"description": "the campaign that was started by this request id"},
        409: {"description": "other rows or options were sent by this request id"},
    },
    summary="Start a campaign over rows",
)
async def start(
    request: Request,
    key: Submitter,
    environment: str | None = None,
    timeout_s: Annotated[float, Query(gt=0)] = 60.0,
    priority: Annotated[int, Query(ge=0, le=2)] = 2,
    first_success: bool = False,
    request_id: Annotated[
        str | None,
        Query(
            description="a name of the caller's: the same again, with the same rows and options, "
            "is the same campaign"
        ),
    ] = None,
) -> Response:
    """Its rows are checked by the fleet's campaign workers, however long that takes."""
    access, lean = access_of(request), lean_of(request)
    env = access.environment(key, environment)
    access.admit(key, 1, lean)
    rows = await request.body()
    options = Check(env=env, timeout_s=timeout_s, priority=priority)
    made, is_new = await _done(
        request,
        lambda campaigns: campaigns.start(
            key, rows, options, request_id, first_success=first_success
        ),
    )
    return _json(
        SubmittedCampaign.of(made),
        status_code=201 if is_new else 200,
        headers={"Location": f"/v1/campaigns/{made.id}"},
    )


@router.get("", summary="The tenant's campaigns")
async def list_(request: Request, key: Submitter) -> Response:
    """The newest first."""
    found = await _done(request, lambda campaigns: campaigns.all_of(key))
    return _json({"campaigns": [SubmittedCampaign.of(each) for each in found]})


@router.get("/{id_}", summary="A campaign's state and progress")
async def show(request: Request, key: Submitter, id_: str) -> Response:
    """`rows` of `total` are done; `counts` has their verdicts."""
    return _json(
        SubmittedCampaign.of(await _done(request, lambda campaigns: campaigns.show(key, id_)))
    )


@router.delete("/{id_}", summary="End a campaign")
async def end(request: Request, key: Submitter, id_: str) -> Response:
    """One that has ended stays as it is. Its rows and records stay with the operator."""
    return _json(
        SubmittedCampaign.of(await _done(request, lambda campaigns: campaigns.end(key, id_)))
    )


@router.post("/{id_}/{how}", summary="Pause, resume or retry a campaign")
async def change(request: Request, key: Submitter, id_: str, how: Change) -> Response:
    """`pause` withdraws its requests in flight, and `resume` goes on; what was done stays. `retry`
    goes on with one that failed or was ended, and checks those rows of a finished one again that
    have no verdict of Lean's. 409 where its state does not allow it."""
    return _json(
        SubmittedCampaign.of(
            await _done(request, lambda campaigns: campaigns.change(key, id_, how))
        )
    )


@router.get("/{id_}/report", summary="A finished campaign's figures")
async def report(request: Request, key: Submitter, id_: str) -> Response:
    """Verdicts, pass@k, times, and what is slow or flaky."""
    return _json(await _done(request, lambda campaigns: campaigns.report(key, id_)))


@router.get("/{id_}/results", response_class=FileResponse, summary="A finished campaign's results")
async def results(request: Request, key: Submitter, id_: str) -> Response:
    """A record a line for each row, or for each of its texts."""
    path = await _done(request, lambda campaigns: campaigns.results(key, id_))
    return FileResponse(path, media_type="application/x-ndjson")
