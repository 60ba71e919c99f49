"""Routes of the operations that trainers call for each candidate, and a short way to them.

FastAPI describes these routes. Its own way to a handler passes two routers, three error handlers
and the resolving of dependencies. That takes several times as long as leanq's work on a request. So
these requests go straight to their handlers, whose arguments are always the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from leanq.errors import LeanQError
from leanq.gateway.access import may
from leanq.gateway.bodies import Body, malformed, reference
from leanq.gateway.connections import ClientGoneError, client_gone

MAX_WAIT_S = 3600
"""The longest that one HTTP request may wait for an end, in seconds."""

WAIT = (
    "Seconds to wait for the end; a request that has not ended by then is answered with 202, runs "
    "on, and can be fetched. Unless given, the end is waited for."
)

Handler = Callable[[Request], Awaitable[Response]]

_Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]
_submitter = may("submit")


class Operations(APIRouter):
    """A router of operations. ``handlers`` has them by their paths."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.handlers: dict[str, tuple[BaseRoute, Handler]] = {}

    def operation(
        self, path: str, kind: type[Struct], *, waits: bool = False, **described: Any
    ) -> Callable[[Callable[..., Awaitable[Response]]], Any]:
        """Adds a handler of POST. It takes a body of this ``kind``, the request and its key; and
        ``wait`` in seconds or None, if it ``waits``."""

        def decorate(endpoint: Callable[..., Awaitable[Response]]) -> Any:
            handle = _handler(Body(kind), endpoint, waits=waits)
            wait: dict[str, Any] = {"name": "wait", "in": "query", "description": WAIT}
            wait["schema"] = {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}
            self.add_api_route(
                path,
                handle,
                methods=["POST"],
                name=endpoint.__name__,
                description=endpoint.__doc__,
                openapi_extra={
                    "requestBody": {"content": reference(kind), "required": True},
                    "parameters": [wait] if waits else [],
                },
                **described,
            )
            self.handlers[path] = self.routes[-1], handle
            return endpoint

        return decorate


def _handler(body: Body, endpoint: Callable[..., Awaitable[Response]], *, waits: bool) -> Handler:
    async def handle(request: Request) -> Response:
        key = await _submitter(request)
        if not _is_json(request.headers.get("content-type")):
            # Browsers ask the server before they send this type for another page; other types they
            # just send.
            raise HTTPException(415, "Content-Type must be application/json")
        read = body.read(await request.body())
        if waits:
            return await endpoint(read, request, key, _wait_of(request))
        return await endpoint(read, request, key)

    return handle


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _wait_of(request: Request) -> float | None:
    wait = request.query_params.get("wait")
    try:
        return None if wait is None else msgspec.convert(wait, _Wait, strict=False)
    except msgspec.ValidationError as error:
        raise malformed("query", error, "wait") from None


class Direct:
    """A short way to ``owner``, which has all paths below ``prefix`` if there is one, and to the
    operations of a router of its own. ``refuse`` answers a request that ends with an error."""

    def __init__(
        self,
        app: ASGIApp,
        owner: FastAPI,
        prefix: str,
        operations: Operations,
        refuse: Callable[[Exception], Response],
    ) -> None:
        self._app = app
        self._owner = owner
        self._prefix = prefix
        self._refuse = refuse
        self._handlers: Mapping[str, tuple[BaseRoute, Handler]] = {
            prefix + path: handler for path, handler in operations.handlers.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._handlers.get(scope["path"]) if scope.get("method") == "POST" else None
        is_below = self._prefix and scope.get("path", "").startswith(f"{self._prefix}/")
        if is_below:
            scope["root_path"] = scope.get("root_path", "") + self._prefix
        if found is None:
            await (self._owner if is_below else self._app)(scope, receive, send)
            return
        scope["route"], handle = found
        scope["app"] = self._owner
        request = Request(scope, receive, send)
        try:
            response = await handle(request)
        except (ClientGoneError, ClientDisconnect) as error:
            response = await client_gone(request, error)
        except (LeanQError, RequestValidationError, HTTPException) as error:
            response = self._refuse(error)
        await response(scope, receive, send)
