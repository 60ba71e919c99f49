"""Who calls: the key of an HTTP request, and what browsers are kept from.

Nothing here looks at the address that a request came from, or at what proxies say of it.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request
from fastapi.datastructures import Headers
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from leanq.gateway.keys import Key, KeyFile

# What clients of 1.x send where they have no key.
_NO_KEYS = frozenset({"", "None", "null"})


class Access:
    """The gateway's rule of who may do what.

    Args:
        keys: those that are known; None where all callers are this machine's user.
        environment: the default environment of keys that name none.
    """

    def __init__(self, keys: KeyFile | None, environment: str) -> None:
        self._keys = keys
        self._open = Key("", "0" * 64, "default")
        self._environment = environment

    def key_of(self, authorization: str | None) -> Key:
        """The key in an ``Authorization`` header, whose ``Bearer`` may be left out.

        Raises:
            HTTPException: 401, there is none, or it is not known.
        """
        if self._keys is None:
            return self._open
        secret = (authorization or "").strip()
        scheme, _, rest = secret.partition(" ")
        if scheme.lower() == "bearer":
            secret = rest.strip()
        if secret in _NO_KEYS:
            raise _unauthorized("Missing API key")
        key = self._keys.find(secret)
        if key is None:
            raise _unauthorized("Invalid API key")
        return key

    def environment(self, key: Key, wanted: str | None) -> str:
        """The environment that a request means.

        Raises:
            HTTPException: 403, the key may not use it.
        """
        if wanted is None:
            return key.environments[0] if key.environments else self._environment
        if key.environments and wanted not in key.environments:
            allowed = ", ".join(key.environments)
            raise HTTPException(
                403, f"the key may not use the environment {wanted!r:.80}; it may use: {allowed}"
            )
        return wanted


def _unauthorized(detail: str) -> HTTPException:
    return HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def _caller(request: Request) -> Key:
    access: Access = request.app.state.access
    return access.key_of(request.headers.get("authorization"))


Caller = Annotated[Key, Depends(_caller)]
"""The key of the request at hand, as an argument of a route."""


class SameOrigin:
    """Refuses what a browser sends on behalf of another site's page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not _is_of(headers.get("host", ""), origin):
                app = PlainTextResponse("requests of other sites' pages are refused", 403)
        await app(scope, receive, send)


def _is_of(host: str, origin: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
