"""leanq's own interface, ``/v1``: the five operations, requests fetched later, and status.

A request without a name of its own lives as long as its connection: if the client goes away, it is
withdrawn. A request with a name, or one that nobody waits for, runs on and can be fetched later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from leanq.errors import LeanQError
from leanq.fleet.stats import FleetStats, fingerprints_of, fleet_stats
from leanq.gateway import v1_bodies as bodies
from leanq.gateway.access import Access, Submitter, Watcher
from leanq.gateway.batches import BatchResponse
from leanq.gateway.bodies import describe, reference
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import ClientGoneError, Ending, client_gone, while_connected
from leanq.gateway.fresh import Fresh
from leanq.gateway.interface import access_of, json_response, lean_of, new_interface
from leanq.gateway.keys import Key
from leanq.gateway.operation_routes import MAX_WAIT_S, WAIT, Operations
from leanq.gateway.operations import options_in, options_of_state, prepared_of
from leanq.gateway.pending import Pending
from leanq.gateway.problems import response_of
from leanq.queue.requests import Reply
from leanq.queue.wire import info_of

BATCH_PATH = "/v1/batch"

Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description=WAIT)]
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "a problem", "content": {"application/problem+json": {}}}
}
_ENDS: dict[int | str, dict[str, Any]] = {
    200: {"content": reference(bodies.Result)},
    202: {"content": reference(bodies.Pending), "description": "it has not ended yet"},
    **_PROBLEMS,
}

router = APIRouter()
operations = Operations()


def make_v1(lean: GatewayClient, access: Access, ending: Ending) -> FastAPI:
    app = new_interface(lean, access, ending, openapi_url="/openapi.json")
    app.state.fleet = Fresh(lambda: asyncio.gather(*map(fleet_stats, lean.clusters)))
    for kind in (LeanQError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, _problem)
    for gone in (ClientGoneError, ClientDisconnect):
        app.add_exception_handler(gone, client_gone)
    describe(app, bodies.DESCRIBED, bodies.EXAMPLES)
    app.include_router(operations)
    app.include_router(router)
    return app


async def _problem(_: Request, error: Exception) -> Response:
    return response_of(error)


@operations.operation(
    "/check", bodies.Check, waits=True, responses=_ENDS, summary="Lean's verdict on a text"
)
async def check(body: Any, request: Request, key: Key, wait: float | None) -> Response:
    """Its messages and theorems, and for each `sorry` a goal with a state."""
    return await _submitted(body, request, key, wait)


@operations.operation(
    "/verify",
    bodies.Verify,
    waits=True,
    responses=_ENDS,
    summary="Whether a candidate proves a target",
)
async def verify(body: Any, request: Request, key: Key, wait: float | None) -> Response:
    """`failed` says which theorem failed by which rule."""
    return await _submitted(body, request, key, wait)


@operations.operation(
    "/step", bodies.Step, waits=True, responses=_ENDS, summary="A tactic, tried on a state"
)
async def step(body: Any, request: Request, key: Key, wait: float | None) -> Response:
    """The next state with its goals; `accepted` if nothing is left to prove."""
    return await _submitted(body, request, key, wait)


@router.get("/requests/{request_id}", responses=_ENDS, summary="What became of a request")
async def fetch(request_id: str, request: Request, key: Submitter, wait: Wait = 0.0) -> Response:
    """Replies are kept for `LEANQ_REPLY_TTL_S`, and any gateway of the queue knows them. Without
    `wait` the answer tells the present state.
    """
    lean = lean_of(request)
    if wait:
        return await _answer(request, key, lean.find(key.tenant, request_id), wait)
    reply = await lean.peek(key.tenant, request_id)
    return _pending(request_id) if reply is None else _result(request, key, reply, request_id)


@router.delete("/requests/{request_id}", responses=_ENDS, summary="Withdraw a request")
async def withdraw(request_id: str, request: Request, key: Submitter) -> Response:
    """Its end: `cancelled`, or its reply if that came first."""
    lean = lean_of(request)
    reply = await while_connected(request, lean.withdraw(key.tenant, request_id))
    return _result(request, key, reply, request_id)


@router.get(
    "/states/{state}/export",
    responses={200: {"content": {"application/octet-stream": {}}}, **_PROBLEMS},
    response_class=Response,
    summary="Bytes that mean the same state anywhere with the same environment",
)
async def export(
    state: str, request: Request, key: Submitter, environment: str | None = None
) -> Response:
    """Other tenants and other queues can import the bytes."""
    lean, access = lean_of(request), access_of(request)
    access.admit(key, 1, lean)
    known = access.state(key, state)
    options = await options_of_state(known, key, access, lean, environment)
    prepared = lean.builder.export(known, options)
    reply = await while_connected(request, lean.patient_reply(key.tenant, prepared))
    return Response(prepared.read(reply), media_type="application/octet-stream")


@router.post(
    "/states",
    responses={200: {"content": reference(bodies.Imported)}, **_PROBLEMS},
    openapi_extra={
        "requestBody": {
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
            "required": True,
        }
    },
    summary="A state from bytes that were exported",
)
async def import_(request: Request, key: Submitter, environment: str | None = None) -> Response:
    """Makes the state known here."""
    lean, access = lean_of(request), access_of(request)
    access.admit(key, 1, lean)
    exported = await request.body()
    prepared = lean.builder.import_(exported, options_in(key, access, environment))
    reply = await while_connected(request, lean.patient_reply(key.tenant, prepared))
    prepared.read(reply)
    return json_response(bodies.Imported(access.sealed(key, reply).state or ""))


@router.post(
    "/batch",
    openapi_extra={
        "requestBody": {
            "description": "One request a line: `op`, the fields of that operation, and `id`",
            "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
            "required": True,
        }
    },
    responses={
        200: {"content": {"application/x-ndjson": {}, "text/event-stream": {}}},
        **_PROBLEMS,
    },
    response_class=Response,
    summary="Any number of requests, with results as they end",
)
async def batch(request: Request, key: Submitter) -> Response:
    """Lines of JSON, or server-sent events if `Accept` asks for them. Each has the `index` of its
    request, its `id`, and a `result` or a `problem`. The gateway reads requests while it sends
    results, and withdraws them if the client goes away.
    """
    events = "text/event-stream" in request.headers.get("accept", "")
    ending: Ending = request.app.state.ending
    return BatchResponse(lean_of(request), access_of(request), key, events=events, ending=ending)


@router.get("/status", responses={200: {"content": reference(bodies.Status)}, **_PROBLEMS})
async def status(request: Request, key: Watcher) -> Response:
    """The environments that the key may use, at this moment."""
    fleet: Fresh[list[FleetStats]] = request.app.state.fleet
    environments = _environments_for(key, await fleet.get())
    outstanding = lean_of(request).outstanding(key.tenant)
    return json_response(bodies.Status(environments, key.tenant, outstanding))


async def _submitted(body: Any, request: Request, key: Key, wait: float | None) -> Response:
    lean, access = lean_of(request), access_of(request)
    prepared = await prepared_of(body, key, access, lean)
    access.admit(key, 1, lean)
    pending = lean.submit(key.tenant, prepared, body.request_id)
    return await _answer(request, key, pending, wait, withdraw=body.request_id is None)


async def _answer(
    request: Request, key: Key, pending: Pending, wait: float | None, *, withdraw: bool = False
) -> Response:
    """Returns the end of a request, or says that it has none after ``wait`` seconds."""
    lean, name = lean_of(request), pending.name.name
    if wait is None:
        reply = await while_connected(request, lean.reply(pending, withdraw=withdraw))
    else:
        await while_connected(request, _known(pending, wait))
        if pending.end is None:
            return _pending(name)
        reply = pending.result()
    return _result(request, key, reply, name)


def _pending(name: str) -> Response:
    headers = {"Location": f"/v1/requests/{name}", "Retry-After": "1"}
    return json_response(bodies.Pending(name), status_code=202, headers=headers)


def _result(request: Request, key: Key, reply: Reply, name: str) -> Response:
    return json_response(bodies.result_of(access_of(request).sealed(key, reply), name))


async def _known(pending: Pending, wait: float) -> None:
    """Waits for the queue to take the request, and then up to ``wait`` seconds for its end."""
    await pending.known()
    await pending.wait(wait)


def _environments_for(key: Key, clusters: Sequence[FleetStats]) -> list[bodies.EnvironmentStatus]:
    """Returns the environments that a key may use, for each cluster."""
    found = []
    for seen in clusters:
        names = key.environments
        found += [each for each in _environments(seen) if not names or each.name in names]
    return found


def _environments(seen: FleetStats) -> list[bodies.EnvironmentStatus]:
    offers = [fingerprints_of(info_of(row.info)) for row in seen.status.workers if row.lease_s > 0]
    return [
        bodies.EnvironmentStatus(
            name,
            info_of(seen.status.environments.get(name, b"")).get("lean"),
            next((each[name] for each in offers if name in each), None),
            waiting=stats.waiting,
            running=round(stats.running),
            workers=round(stats.workers),
            slots=round(stats.slots),
        )
        for name, stats in sorted(seen.environments.items())
    ]
