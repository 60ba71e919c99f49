"""Campaigns over HTTP: whole data sets sent as rows, run by ``leanq campaign worker``.

The gateway writes the rows to a folder that campaign workers reach under the same path. Then it
sends RQ a campaign whose results go beside them. A tenant's campaigns have their data in the
tenant's own folder, so no id leads to another tenant's.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse

from leanq.campaigns.coordinator import Plan
from leanq.campaigns.submitted import Change, changed, folder_of, report_on, results_of, submit_rows
from leanq.errors import UsageError
from leanq.gateway.access import Submitter
from leanq.gateway.interface import access_of, json_response, lean_of
from leanq.gateway.keys import Key
from leanq.producer.request_builder import Check

if TYPE_CHECKING:
    from leanq.campaigns.rq_queue import Campaigns, CampaignStatus

_MOST_UNFINISHED = 16
_WINDOW = 1000
# Nothing removes the files of campaigns, and a tenant can start any number.
_FOLDER_BYTES = 4 << 30

_EXAMPLE = (
    '{"id": 1, "code": "theorem t (p : Prop) (h : p) : p := h"}\n'
    '{"id": 2, "code": "theorem t (p : Prop) : p := sorry"}\n'
)

router = APIRouter(prefix="/campaigns", tags=["Campaigns"])


class TenantCampaigns:
    """The campaigns that came over HTTP. Its methods block; call them in a thread.

    They raise HTTPException: 404, the key's tenant has no such campaign; 409, its state does not
    allow the call; 429, the tenant has too many unfinished ones.

    Args:
        campaigns: the campaigns in RQ.
        folder: the folder of rows and results, which campaign workers reach too.
    """

    def __init__(self, campaigns: Campaigns, folder: Path) -> None:
        self._campaigns = campaigns
        self._folder = folder

    def start(
        self, key: Key, rows: bytes, options: Check, request_id: str | None, *, first_success: bool
    ) -> tuple[CampaignStatus, bool]:
        """Submits a campaign over rows, unless this ``request_id`` already did; returns it, and
        True if it is new.

        Raises as :func:`submit_rows`, and HTTPException (413): the tenant's files are too large.
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
        own = (each for each in self._campaigns.list() if self._is_own(key, each))
        return sorted(own, key=lambda each: each.submitted_at, reverse=True)

    def show(self, key: Key, id_: str) -> CampaignStatus:
        with contextlib.suppress(UsageError):
            found = self._campaigns.show(id_)
            if self._is_own(key, found):
                return found
        raise HTTPException(404, f"there is no campaign {id_!r:.80} of this key's tenant")

    def change(self, key: Key, id_: str, how: Change) -> CampaignStatus:
        """Changes one campaign of the tenant; cancelling an ended one does nothing."""
        self.show(key, id_)
        if how == "retry":
            self._check_room(key)
        try:
            return changed(self._campaigns, id_, how)
        except UsageError as error:
            raise HTTPException(409, str(error)) from None

    def results(self, key: Key, id_: str) -> Path:
        found = self.show(key, id_)
        try:
            return results_of(found)
        except UsageError as error:
            raise HTTPException(409, str(error)) from None

    def _check_room(self, key: Key) -> None:
        unfinished = sum(not each.ended for each in self.all_of(key))
        if unfinished >= _MOST_UNFINISHED:
            raise HTTPException(
                429,
                f"{unfinished} campaigns of the tenant have not ended; end one, or wait",
                {"Retry-After": "60"},
            )

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


async def _tenants_of(request: Request) -> TenantCampaigns:
    tenants = cast("TenantCampaigns | None", request.app.state.campaigns)
    if tenants is None:
        raise HTTPException(
            404, "this gateway takes no campaigns; it was started without --campaigns"
        )
    return tenants


# FastAPI runs the handlers below that are not asynchronous in threads. They name the key before
# this, since the first parameter is the first to refuse.
_Tenants = Annotated[TenantCampaigns, Depends(_tenants_of)]


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
    tenants: _Tenants,
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
    access = access_of(request)
    env = access.environment(key, environment)
    access.admit(key, 1, lean_of(request))
    rows = await request.body()
    options = Check(env=env, timeout_s=timeout_s, priority=priority)
    made, is_new = await asyncio.to_thread(
        tenants.start, key, rows, options, request_id, first_success=first_success
    )
    headers = {"Location": f"/v1/campaigns/{made.id}"}
    return json_response(made.shown(), status_code=201 if is_new else 200, headers=headers)


@router.get("", summary="The tenant's campaigns")
def list_(key: Submitter, tenants: _Tenants) -> Response:
    """The newest first."""
    return json_response({"campaigns": [each.shown() for each in tenants.all_of(key)]})


@router.get("/{id_}", summary="A campaign's state and progress")
def show(key: Submitter, tenants: _Tenants, id_: str) -> Response:
    """`rows` of `total` are done; `counts` has their verdicts."""
    return json_response(tenants.show(key, id_).shown())


@router.delete("/{id_}", summary="End a campaign")
def end(key: Submitter, tenants: _Tenants, id_: str) -> Response:
    """A campaign that has ended stays as it is. The operator keeps its rows and records."""
    return json_response(tenants.change(key, id_, "cancel").shown())


@router.post("/{id_}/{how}", summary="Pause, resume or retry a campaign")
def change(
    key: Submitter, tenants: _Tenants, id_: str, how: Literal["pause", "resume", "retry"]
) -> Response:
    """`pause` withdraws its requests in flight, `resume` goes on, and finished rows stay. `retry`
    goes on with a campaign that failed or was ended. In a finished one, it repeats the rows without
    a verdict from Lean. 409 if its state does not allow the change.
    """
    return json_response(tenants.change(key, id_, how).shown())


@router.get("/{id_}/report", summary="A finished campaign's figures")
def report(key: Submitter, tenants: _Tenants, id_: str) -> Response:
    """Verdicts, pass@k, times, and slow or flaky rows."""
    return json_response(report_on(tenants.results(key, id_)))


@router.get("/{id_}/results", response_class=FileResponse, summary="A finished campaign's results")
def results(key: Submitter, tenants: _Tenants, id_: str) -> Response:
    """One record a line, for each row or for each of its texts."""
    return FileResponse(tenants.results(key, id_), media_type="application/x-ndjson")
