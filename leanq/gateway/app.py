"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from leanq.gateway import kimina
from leanq.gateway.access import Access, Authenticated, Screened
from leanq.gateway.bodies import describe
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import ClientGoneError, Ending, Timely, client_gone
from leanq.gateway.interface import new_interface
from leanq.gateway.limits import Connections, most_connections
from leanq.gateway.metrics import GatewayMetrics, Measured, Readiness
from leanq.gateway.operation_routes import Direct
from leanq.gateway.page import routes
from leanq.gateway.page.actions import CHANGES
from leanq.gateway.page.reads import READS
from leanq.gateway.problems import response_of
from leanq.gateway.v1 import BATCH_PATH, make_v1
from leanq.gateway.v1 import operations as v1_operations

_PUBLIC = frozenset({"/", "/health", "/health/", "/ready", "/api/openapi.json", "/v1/openapi.json"})

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


def make_app(lean: GatewayClient, access: Access, hostnames: Sequence[str] = ()) -> FastAPI:
    """Returns the application in front of the queue of ``lean``, an open client.

    Args:
        hostnames: the names by which clients reach it, besides loopback's; ``*`` allows any.

    Its ``state`` holds ``connections``, whose number the server limits; ``metrics``; and
    ``readiness``. ``stopping`` and ``ending`` are events. After the first, the page's watchers are
    disconnected; after the second, the gateway waits for no request.
    """
    stopping, ending = asyncio.Event(), Ending()
    app = new_interface(lean, access, ending, openapi_url="/api/openapi.json")
    app.state.stopping = stopping
    app.state.connections = connections = Connections(most_connections())
    app.state.readiness = readiness = Readiness(lean)
    app.state.metrics = GatewayMetrics(lean, connections, readiness)
    # The middleware that is added first is innermost.
    inner = make_v1(lean, access, ending)
    for owner, prefix, operations, refuse in (
        (app, "", kimina.operations, _kiminas_refusal),
        (inner, "/v1", v1_operations, response_of),
    ):
        app.add_middleware(Direct, owner=owner, prefix=prefix, operations=operations, refuse=refuse)
    app.add_middleware(
        Authenticated,
        access=access,
        connections=connections,
        public=_PUBLIC,
        apart=routes.BELOW,
        streamed=frozenset({BATCH_PATH}),
        refuse=_refusal,
    )
    app.add_middleware(Timely, streamed=frozenset({BATCH_PATH}))
    app.add_middleware(
        TrustedHostMiddleware,
        allowed_hosts=[*LOOPBACK_NAMES, *hostnames],
        www_redirect=False,
    )
    app.add_middleware(Screened)
    app.add_middleware(Measured, metrics=app.state.metrics)
    for gone in (ClientGoneError, ClientDisconnect):
        app.add_exception_handler(gone, client_gone)
    describe(app, kimina.DESCRIBED, kimina.EXAMPLES)
    app.include_router(kimina.operations)
    app.include_router(kimina.router)
    app.add_api_route("/ready", _ready, summary="Whether this gateway is to be sent requests")
    page = routes.Page(lean, access, connections, stopping).app(READS, CHANGES)
    app.mount(routes.BELOW.rstrip("/"), page)

    async def front(request: Request) -> Any:
        """Serves the page to browsers; tells other clients what the gateway serves."""
        if "text/html" in request.headers.get("accept", ""):
            return page
        return JSONResponse(await kimina.health())

    app.router.routes.append(Route("/", front, methods=["GET"], include_in_schema=False))
    return app


def _refusal(path: str, error: HTTPException) -> Response:
    if path.startswith("/v1/"):
        return response_of(error)
    return _kiminas_refusal(error)


async def _ready(request: Request) -> Response:
    """200 while its queue answers and it was not told to end, else 503. It needs no key. `/health`
    is 200 for as long as the process serves.
    """
    if await request.app.state.readiness.is_ready():
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready"}, 503, {"Retry-After": "1"})


def _kiminas_refusal(error: Exception) -> Response:
    """Answers as Kimina Lean Server does: a malformed body gets 422, with each fault and its place.

    The answer leaves out the input, which may be anything.
    """
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    assert isinstance(error, RequestValidationError)
    detail: list[dict[str, Any]] = [
        {"type": each["type"], "loc": each["loc"], "msg": each["msg"]} for each in error.errors()
    ]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")
