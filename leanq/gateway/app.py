"""The gateway as an ASGI application."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware

from leanq import __version__
from leanq.client import AsyncLeanQClient
from leanq.gateway import kimina
from leanq.gateway.access import Access, SameOrigin
from leanq.gateway.connections import ClientGoneError

# Several of the largest requests that a queue takes.
MAX_BODY_BYTES = 64 << 20
_CLIENT_GONE = 499

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


def make_app(lean: AsyncLeanQClient, access: Access, hostnames: Sequence[str] = ()) -> FastAPI:
    """The application in front of the queue of ``lean``, an open client that others may use too.

    Args:
        access: who may call.
        hostnames: names under which clients reach it, besides those of loopback; ``*`` is any.
    """
    app = FastAPI(
        title="leanq",
        version=__version__,
        summary="Lean 4 at the scale of reinforcement learning",
        openapi_url="/api/openapi.json",
        # Their pages would load programs from elsewhere.
        docs_url=None,
        redoc_url=None,
        max_body_size=MAX_BODY_BYTES,
    )
    app.state.lean = lean
    app.state.access = access
    app.add_middleware(SameOrigin)
    app.add_middleware(
        TrustedHostMiddleware,
        allowed_hosts=[*LOOPBACK_NAMES, *hostnames],
        www_redirect=False,
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.include_router(kimina.router)
    return app


async def _invalid(_: Request, error: Exception) -> Response:
    """422 with what is wrong where, and without the input, which may be anything."""
    assert isinstance(error, RequestValidationError)
    detail: list[dict[str, Any]] = [
        {"type": each["type"], "loc": each["loc"], "msg": each["msg"]} for each in error.errors()
    ]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
