"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse

from leanq import __version__
from leanq.gateway import kimina
from leanq.gateway.access import Access, Authenticated, SameOrigin
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import ClientGoneError
from leanq.gateway.problems import response_of
from leanq.gateway.v1 import BATCH_PATH, make_v1

_CLIENT_GONE = 499
_PUBLIC = frozenset({"/", "/health", "/health/", "/api/openapi.json", "/v1/openapi.json"})

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


def make_app(lean: GatewayClient, access: Access, hostnames: Sequence[str] = ()) -> FastAPI:
    """The application in front of the queue of ``lean``, an open client that others may use too.

    Args:
        access: who may call.
        hostnames: names under which clients reach it, besides those of loopback; ``*`` is any.

    Its ``state.ending`` is an event: once it is set, no request is waited for any more.
    """
    ending = asyncio.Event()
    app = FastAPI(
        title="leanq",
        version=__version__,
        summary="Lean 4 at the scale of reinforcement learning",
        openapi_url="/api/openapi.json",
        # Their pages would load programs from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.lean = lean
    app.state.access = access
    app.state.ending = ending
    app.add_middleware(
        Authenticated,
        access=access,
        public=_PUBLIC,
        streamed=frozenset({BATCH_PATH}),
        refuse=_refusal,
    )
    app.add_middleware(SameOrigin)
    app.add_middleware(
        TrustedHostMiddleware,
        allowed_hosts=[*LOOPBACK_NAMES, *hostnames],
        www_redirect=False,
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.include_router(kimina.router)
    v1 = make_v1(lean, access, ending)
    v1.add_exception_handler(ClientGoneError, _client_gone)
    app.mount("/v1", v1)
    return app


def _refusal(path: str, error: HTTPException) -> Response:
    if path.startswith("/v1/"):
        return response_of(error)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _invalid(_: Request, error: Exception) -> Response:
    """422 with what is wrong where, and without the input, which may be anything."""
    assert isinstance(error, RequestValidationError)
    detail: list[dict[str, Any]] = [
        {"type": each["type"], "loc": each["loc"], "msg": each["msg"]} for each in error.errors()
    ]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
