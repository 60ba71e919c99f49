"""The common parts of the gateway's interfaces: their set-up, and access to it in handlers."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request, Response

from leanq import __version__
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import Ending


def new_interface(
    lean: GatewayClient, access: Access, ending: Ending, *, openapi_url: str
) -> FastAPI:
    """Returns an application without routes, whose handlers find the arguments in requests."""
    app = FastAPI(
        title="leanq",
        version=__version__,
        summary="Lean 4 at the scale of reinforcement learning",
        openapi_url=openapi_url,
        # FastAPI's documentation pages would load scripts from other sites.
        docs_url=None,
        redoc_url=None,
    )
    app.state.lean = lean
    app.state.access = access
    app.state.ending = ending
    return app


def json_response(content: Any, **how: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", **how)


def lean_of(request: Request) -> GatewayClient:
    return cast("GatewayClient", request.app.state.lean)


def access_of(request: Request) -> Access:
    return cast("Access", request.app.state.access)
