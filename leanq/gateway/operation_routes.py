"""Routes of the operations that trainers call for each candidate, and a short way to them.

FastAPI describes these routes. Its own way to a handler passes two routers, three error handlers
and the resolving of dependencies. That takes several times as long as leanq's work on a request. So
these requests go straight to their handlers, whose arguments are always the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from leanq.errors import LeanQError
from leanq.gateway.access import check_number, may
from leanq.gateway.bodies import Bounds
from leanq.gateway.connections import ClientGoneError, client_gone

MAX_WAIT_S = 3600
"""The longest that one HTTP request may wait for an end, in seconds."""

Handler = Callable[[Request], Awaitable[Response]]

_wait: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=MAX_WAIT_S)])
_submitter = may("submit")


class OperationRoute(APIRoute):
    """A route whose endpoint takes ``body``, ``request``, ``key`` and perhaps ``wait``.

    ``bounds`` has the bounds of a body, by its model.
    """

    bounds: ClassVar[Mapping[Any, Bounds]]

    def get_route_handler(self) -> Any:
        """Returns the handler; it raises the same errors as FastAPI's own."""
        endpoint = self.endpoint
        hints = get_type_hints(endpoint)
        bodies: TypeAdapter[Any] = TypeAdapter(hints["body"])
        bounds = self.bounds[hints["body"]]
        may_wait = "wait" in hints

        async def handle(request: Request) -> Response:
            key = await _submitter(request)
            if not _is_json(request.headers.get("content-type")):
                # Browsers ask the server before they send this type for another page; other types
                # they just send.
                raise HTTPException(415, "Content-Type must be application/json")
            data = bounds.bounded(await request.body(), partial(check_number, key))
            body = _valid("body", bodies.validate_json, data)
            how = {}
            if may_wait and (wait := request.query_params.get("wait")) is not None:
                how["wait"] = _valid("query", _wait.validate_python, wait)
            response: Response = await endpoint(body=body, request=request, key=key, **how)
            return response

        return handle


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _valid(where: str, validate: Callable[[Any], Any], data: Any) -> Any:
    try:
        return validate(data)
    except ValidationError as error:
        raise RequestValidationError(
            [{**each, "loc": (where, *each["loc"])} for each in details_of(error)]
        ) from None


def details_of(error: ValidationError) -> list[Any]:
    """Returns what is wrong with an input, without the input."""
    return [*error.errors(include_url=False, include_context=False, include_input=False)]


class Direct:
    """A short way to ``owner``, which has all paths below ``prefix`` if there is one, and to the
    operations of a router of its own. ``refuse`` answers a request that ends with an error."""

    def __init__(
        self,
        app: ASGIApp,
        owner: FastAPI,
        prefix: str,
        operations: APIRouter,
        refuse: Callable[[Exception], Response],
    ) -> None:
        self._app = app
        self._owner = owner
        self._prefix = prefix
        self._refuse = refuse
        self._handlers: dict[str, tuple[OperationRoute, Handler]] = {
            prefix + route.path: (route, route.get_route_handler())
            for route in operations.routes
            if isinstance(route, OperationRoute)
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
