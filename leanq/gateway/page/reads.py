"""The parts of the page that callers look at, and change nothing by."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote

from fastapi import HTTPException, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from leanq.gateway.keys import Key
from leanq.gateway.page import actions, requests
from leanq.gateway.page.routes import Handler, Page
from leanq.gateway.page.sections import SECTIONS
from leanq.gateway.page.viewers import Viewer

_LIVE_S = 2.0


def _check_watches(viewer: Viewer) -> None:
    if not viewer.watches:
        raise HTTPException(403, "the key has not the right 'status', so it sees no fleet")


async def _overview(page: Page, request: Request, _key: Key, viewer: Viewer) -> Response:
    if not viewer.watches:
        return page.away(request, "page/check")
    overview = await page.overview(viewer)
    parts = {name: page.section(name, overview, viewer) for name in SECTIONS}
    return page.page(request, "overview.html", viewer, parts=parts)


async def _events(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    _check_watches(viewer)
    # Otherwise nginx collects events before it sends any.
    headers = {"X-Accel-Buffering": "no"}
    events = page.watched(viewer, request)
    return _Events(page.watching(key), events, media_type="text/event-stream", headers=headers)


class _Events(StreamingResponse):
    """A stream that is counted from its beginning. Its content begins a turn of the loop later, and
    all that come in one turn would find room."""

    def __init__(
        self, counted: AbstractContextManager[None], events: AsyncIterator[bytes], **how: Any
    ) -> None:
        super().__init__(events, **how)
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted:
            await super().__call__(scope, receive, send)


async def _check_form(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    return page.page(request, "check.html", viewer, environments=await _offered(page, key, viewer))


async def _offered(page: Page, key: Key, viewer: Viewer) -> list[str]:
    """Returns the environments that the key may check in, its default first."""
    default = page.access.environment(key, None)
    if key.environments:
        return [*key.environments]
    known = {name for queue in page.lean.queues for name in await queue.shard.environments()}
    return [default, *sorted(known - {default})]


async def _search(page: Page, request: Request, _key: Key, viewer: Viewer) -> Response:
    wanted = request.query_params.get("id", "").strip()
    return page.away(request, f"page/requests/{quote(wanted, safe='')}" if wanted else "")


async def _request(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    found = await actions.found(page, key, viewer, request.path_params["request_id"])
    return page.page(request, "request.html", viewer, **requests.context_of(found))


async def _live(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    """Shows the present state of a request; waits shortly for its end."""
    request_id = request.path_params["request_id"]
    # A wait would tell callers of other tenants that there is one.
    kept = page.lean.recent.find(request_id) if viewer.name_of(request_id) else None
    if kept and kept.pending:
        await kept.pending.wait(_LIVE_S)
    return await actions.fragment(page, key, viewer, request_id)


async def _text(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    """Sends the whole text as it came, for the browser to save and not to show."""
    found = await actions.found(page, key, viewer, request.path_params["request_id"])
    if found.request is None:
        raise HTTPException(404, "the text of this request is not kept any more")
    headers = {"Content-Disposition": 'attachment; filename="request.lean"'}
    return PlainTextResponse(requests.text_of(found.request), headers=headers)


READS: dict[str, Handler] = {
    "/": _overview,
    "/check": _check_form,
    "/events": _events,
    "/requests": _search,
    "/requests/{request_id}": _request,
    "/requests/{request_id}/live": _live,
    "/requests/{request_id}/text": _text,
}
"""By the path below the page's."""
