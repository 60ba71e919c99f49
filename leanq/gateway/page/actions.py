"""The changes that callers of the page make: they send texts and withdraw them, retry and drop dead
letters, pause, and set weights.

Each change is a handler, which raises HTTPException (403) if the viewer may not make it.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

from fastapi import HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from leanq.errors import InvalidRequestError, UsageError
from leanq.gateway.keys import Key
from leanq.gateway.operations import prepared_of
from leanq.gateway.page import requests
from leanq.gateway.page.routes import Handler, Page
from leanq.gateway.page.viewers import Viewer
from leanq.gateway.v1_bodies import Check, Verify
from leanq.queue.keys import shard_of
from leanq.queue.operator_queue import LEAST_WEIGHT, MOST_WEIGHT, OperatorQueue, send_again
from leanq.queue.results import DeadLetter
from leanq.queue.settings import check_name


async def _check(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    _check_submits(viewer)
    form = await page.form(request, key)
    # Browsers send forms with these line ends; columns and lines must match the text.
    code, target = (form.get(name, "").replace("\r\n", "\n") for name in ("code", "target"))
    environment = form.get("environment") or None
    texts = {"code": code, "target": target} if target.strip() else {"code": code}
    body = (Verify if target.strip() else Check)(**texts, environment=environment)
    return await _sent(page, request, key, viewer, body)


async def _sent(page: Page, request: Request, key: Key, viewer: Viewer, body: Any) -> Response:
    lean, access = page.lean, page.access
    prepared = await prepared_of(body, key, access, lean)
    access.admit(key, 1, lean)
    pending = lean.submit(key.tenant, prepared, None)
    # Otherwise a look before the queue has it would find nothing.
    await pending.known()
    if pending.end is not None:
        pending.result()
    request_id = pending.name.request_id(lean.settings.shards)
    return await _shown(page, request, key, viewer, request_id)


async def _shown(
    page: Page, request: Request, key: Key, viewer: Viewer, request_id: str
) -> Response:
    """Answers a script with the request as a part of its page, and others with its address."""
    if "hx-request" in request.headers:
        return await fragment(page, key, viewer, request_id)
    return page.away(request, f"page/requests/{quote(request_id, safe='')}")


async def fragment(page: Page, key: Key, viewer: Viewer, request_id: str) -> Response:
    context = requests.context_of(await found(page, key, viewer, request_id))
    return HTMLResponse(page.render("request_body.html", viewer=viewer, **context))


async def found(page: Page, key: Key, viewer: Viewer, request_id: str) -> requests.Found:
    there = await requests.find(page.lean, viewer, request_id)
    if there is None:
        raise HTTPException(
            404,
            f"no request {request_id!r:.80} is known to you: it never was, its reply has gone, or "
            "it is another tenant's",
        )
    return requests.sealed(there, page.access, key)


async def _profile(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    """Runs a request's text once more, to say where Lean spends its time."""
    _check_submits(viewer)
    request_id = (await page.form(request, key)).get("request_id", "")
    body = requests.profile_of(await found(page, key, viewer, request_id))
    if body is None:
        raise HTTPException(404, "no text of this request is kept that Lean could read again")
    return await _sent(page, request, key, viewer, body)


async def _withdraw(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    _check_submits(viewer)
    request_id = (await page.form(request, key)).get("request_id", "")
    name = viewer.name_of(request_id)
    if name is None:
        raise HTTPException(404, "only a request that came through a gateway is withdrawn here")
    await page.lean.withdraw(name.tenant, name.name)
    page.looks.forget()
    return await _shown(page, request, key, viewer, request_id)


async def _retry(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    await send_again(*await _letter(page, request, key, viewer))
    return await _back(page, request, viewer, "dead")


async def _drop(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    queue, letter = await _letter(page, request, key, viewer)
    await queue.drop_dead(letter.submission.request_id)
    return await _back(page, request, viewer, "dead")


async def _letter(
    page: Page, request: Request, key: Key, viewer: Viewer
) -> tuple[OperatorQueue, DeadLetter]:
    request_id = (await page.form(request, key)).get("request_id", "")
    if not viewer.operates:
        _check_submits(viewer)
    shard = shard_of(request_id)
    for queue in page.lean.queues:
        letter = await queue.dead_letter(request_id) if queue.shard.keys.shard == shard else None
        # The answer does not reveal that another tenant has one.
        if letter and viewer.owns(letter.submission.tenant, letter.submission.environment):
            return queue, letter
    raise UsageError(f"there is no dead letter {request_id!r:.80}")


async def _pause(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    form = await page.form(request, key)
    _check_operates(viewer)
    name, paused = form.get("name", ""), form.get("paused") == "yes"
    kind: Literal["environment", "tenant"] = "environment"
    if form.get("kind") == "tenant":
        kind = "tenant"
    elif form.get("kind") != "environment":
        raise HTTPException(422, "kind must be environment or tenant")
    check_name(kind, name)
    queues = page.lean.queues
    if kind == "environment" and not viewer.sees_environment(name):
        raise HTTPException(403, f"the key may not use the environment {name!r}")
    if kind == "environment" and paused:
        known = {name for queue in queues for name in await queue.shard.environments()}
        if name not in known:
            raise await queues[0].shard.unknown(name)
    for queue in queues:
        await queue.set_paused(kind, name, paused=paused)
    return await _back(page, request, viewer, f"{kind}s")


async def _weight(page: Page, request: Request, key: Key, viewer: Viewer) -> Response:
    form = await page.form(request, key)
    _check_operates(viewer)
    tenant, text = form.get("tenant", ""), form.get("weight", "").strip()
    try:
        weight = float(text) if text else None
    except ValueError:
        raise HTTPException(422, f"a weight must be a number, got {text!r:.40}") from None
    check_name("tenant", tenant)
    if weight is not None and not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise InvalidRequestError(
            f"a weight must lie between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, got {weight:g}"
        )
    for queue in page.lean.queues:
        await queue.set_weight(tenant, weight)
    return await _back(page, request, viewer, "tenants")


async def _back(page: Page, request: Request, viewer: Viewer, section: str) -> Response:
    """Answers a change with the part that it concerns, or with the page."""
    page.looks.forget()
    if "hx-request" not in request.headers:
        return page.away(request, f"#{section}")
    return HTMLResponse(page.section(section, await page.overview(viewer), viewer))


def _check_submits(viewer: Viewer) -> None:
    if not viewer.submits:
        raise HTTPException(403, "the key has not the right 'submit'")


def _check_operates(viewer: Viewer) -> None:
    if not viewer.operates:
        raise HTTPException(
            403,
            "only a key with the right 'operate' changes what is of all tenants; "
            "'leanq pause' and 'leanq tenant' do so without the gateway",
        )


CHANGES: dict[str, Handler] = {
    "/check": _check,
    "/profile": _profile,
    "/withdraw": _withdraw,
    "/dead/retry": _retry,
    "/dead/drop": _drop,
    "/pause": _pause,
    "/weight": _weight,
}
"""By the path below the page's."""
