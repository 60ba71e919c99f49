"""Campaigns over HTTP: whole data sets sent as rows, run by ``leanq campaign worker``.

The gateway writes the rows to a folder that campaign workers reach under the same path. Then it
sends RQ a campaign whose results go beside them. A tenant's campaigns have their data in the
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
# Nothing removes the files of campaigns, and a tenant can start any number.
_FOLDER_BYTES = 4 << 30
_ENDED = frozenset({"finished", "failed", "cancelled"})

_EXAMPLE = (
    '{"id": 1, "code": "theorem t (p : Prop) (h : p) : p := h"}\n'
    '{"id": 2, "code": "theorem t (p : Prop) : p := sorry"}\n'
)

router = APIRouter(prefix="/campaigns", tags=["Campaigns"])


class TenantCampaigns:
    """The campaigns that came over HTTP. Its methods block; call them in a thread.

    Args:
        campaigns: the campaigns in RQ.
        folder: the folder of rows and results, which campaign workers reach too.
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
        """Writes the rows and submits the campaign, unless this ``request_id`` already did.

        Returns:
            The campaign, and True if it is new.

        Raises:
            ConflictError: the ``request_id`` came before with other rows or options.
            UsageError: there are no rows, or the options are wrong.
            HTTPException: 429, the tenant has too many unfinished campaigns; 413, its files
                together are too large.
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
        """Returns the campaigns of the key's tenant, newest first."""
        own = (each for each in self._campaigns.list() if self._is_own(key, each))
        return sorted(own, key=lambda each: each.submitted_at, reverse=True)

    def show(self, key: Key, id_: str) -> CampaignStatus:
        """Returns one campaign of the tenant.

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
        """Pauses, resumes or retries one campaign of the tenant.

        Raises:
            HTTPException: 404, as of :meth:`show`; 409, its state does not allow it; 429, for a
                retry, if the tenant has too many unfinished campaigns.
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
        """Ends one campaign of the tenant, unless it has ended."""
        if self.show(key, id_).state not in _ENDED:
            self._campaigns.cancel(id_)
        return self.show(key, id_)

    def results(self, key: Key, id_: str) -> Path:
        """Returns the file of its results.

        Raises:
            HTTPException: 404, as of :meth:`show`; 409, it has no results.
        """
        found = self.show(key, id_)
        try:
            return results_of(found)
        except UsageError as error:
            raise HTTPException(409, str(error)) from None

    def report(self, key: Key, id_: str) -> dict[str, Any]:
        """Returns the figures of its report; raises as :meth:`results`."""
        return report_on(self.results(key, id_))

    def _is_own(self, key: Key, status: CampaignStatus) -> bool:
        return Path(status.campaign.data).parent == folder_of(self._folder, key.tenant)


def _bytes_in(folder: Path) -> int:
    """Returns the bytes of the files in a folder; files may come and go meanwhile."""
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
    """The fleet's campaign workers check its rows, however long that takes."""
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
    """A campaign that has ended stays as it is. The operator keeps its rows and records."""
    return _json(
        SubmittedCampaign.of(await _done(request, lambda campaigns: campaigns.end(key, id_)))
    )


@router.post("/{id_}/{how}", summary="Pause, resume or retry a campaign")
async def change(request: Request, key: Submitter, id_: str, how: Change) -> Response:
    """`pause` withdraws its requests in flight, `resume` goes on, and finished rows stay. `retry`
    goes on with a campaign that failed or was ended. In a finished one, it repeats the rows without
    a verdict from Lean. 409 if its state does not allow the change.
    """
    return _json(
        SubmittedCampaign.of(
            await _done(request, lambda campaigns: campaigns.change(key, id_, how))
        )
    )


@router.get("/{id_}/report", summary="A finished campaign's figures")
async def report(request: Request, key: Submitter, id_: str) -> Response:
    """Verdicts, pass@k, times, and slow or flaky rows."""
    return _json(await _done(request, lambda campaigns: campaigns.report(key, id_)))


@router.get("/{id_}/results", response_class=FileResponse, summary="A finished campaign's results")
async def results(request: Request, key: Submitter, id_: str) -> Response:
    """One record a line, for each row or for each of its texts."""
    path = await _done(request, lambda campaigns: campaigns.results(key, id_))
    return FileResponse(path, media_type="application/x-ndjson")
