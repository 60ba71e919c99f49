"""What the gateway's interfaces have in common: one set-up, and what their handlers find in it."""

from __future__ import annotations

from typing import cast

from fastapi import FastAPI, Request

from leanq import __version__
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import Ending


def new_interface(
    lean: GatewayClient, access: Access, ending: Ending, *, openapi_url: str
) -> FastAPI:
    """An application without routes, whose handlers find the arguments in their requests.

    Args:
        lean: the client of the queue.
        access: who may call.
        ending: once it is set, no request is waited for any more.
        openapi_url: where its description is, below where it is mounted.
    """
    app = FastAPI(
        title="leanq",
        version=__version__,
        summary="Lean 4 at the scale of reinforcement learning",
        openapi_url=openapi_url,
        # Their pages would load programs from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.lean = lean
    app.state.access = access
    app.state.ending = ending
    return app


def lean_of(request: Request) -> GatewayClient:
    """The client of the queue."""
    return cast("GatewayClient", request.app.state.lean)


def access_of(request: Request) -> Access:
    """Who may call."""
    return cast("Access", request.app.state.access)
