"""Who calls, and what they may do: keys, limits, and what browsers are kept from.

Nothing here looks at the address that a request came from, or at what proxies say of it.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request, Response
from fastapi.datastructures import Headers
from fastapi.responses import PlainTextResponse
from msgspec.structs import replace
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from leanq.errors import UnknownStateError
from leanq.gateway.keys import Key, KeyFile, Right
from leanq.queue.requests import Reply

# What clients of 1.x send where they have no key.
_NO_KEYS = frozenset({"", "None", "null"})
_STATE_LENGTH = 64
_RETRY_AFTER_S = 1.0


class Access:
    """The gateway's rules of who may do what.

    Args:
        keys: those that are known; None where all callers are this machine's user.
        environment: the default environment of keys that name none.
    """

    def __init__(
        self,
        keys: KeyFile | None,
        environment: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._open = Key("", "0" * 64, "default")
        self._environment = environment
        self._clock = clock
        # By the key's name: requests that it may send at once, below 0 if it has sent more, and as
        # of when.
        self._allowance: dict[str, tuple[float, float]] = {}

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

    def admit(self, key: Key, count: int, outstanding: int) -> None:
        """Lets so many more requests in, beside those of the key's tenant that are outstanding.

        Raises:
            HTTPException: 429, the key has reached a limit; 413, it can never be within it.
        """
        if count > key.outstanding:
            raise HTTPException(
                413,
                f"{count} requests at once, and the key allows {key.outstanding} outstanding ones; "
                "send smaller batches",
            )
        if outstanding + count > key.outstanding:
            raise _too_many(
                f"{outstanding} requests of the tenant are outstanding, and the key allows "
                f"{key.outstanding}",
                _RETRY_AFTER_S,
            )
        if key.rate_per_s is None:
            return
        now_s = self._clock()
        most = max(1.0, key.rate_per_s)
        allowed, at_s = self._allowance.get(key.name, (most, now_s))
        allowed = min(most, allowed + (now_s - at_s) * key.rate_per_s)
        # A batch larger than what a second allows is let in, and waited for afterwards.
        if allowed < min(count, most):
            wait_s = (min(count, most) - allowed) / key.rate_per_s
            raise _too_many(f"the key allows {key.rate_per_s:g} requests a second", wait_s)
        self._allowance[key.name] = allowed - count, now_s

    def sealed(self, key: Key, reply: Reply) -> Reply:
        """A reply whose states are such as only the key's tenant can use."""
        sorries = tuple(
            replace(sorry, state=sorry.state and self._seal(key, sorry.state))
            for sorry in reply.sorries
        )
        return replace(reply, sorries=sorries, state=reply.state and self._seal(key, reply.state))

    def state(self, key: Key, sealed: str) -> str:
        """The state that the key's tenant has been given as ``sealed``.

        Raises:
            UnknownStateError: the tenant was given no such state.
        """
        state = sealed[:_STATE_LENGTH]
        # Not ASCII, what is compared in constant time would have to be bytes.
        if not hmac.compare_digest(
            self._seal(key, state).encode("utf8", "replace"), sealed.encode("utf8", "replace")
        ):
            raise UnknownStateError(f"the state {sealed!r:.100} is not known to this key's tenant")
        return state

    def _seal(self, key: Key, state: str) -> str:
        if self._keys is None:
            return state
        told = f"{key.tenant} {state}".encode("utf8", "replace")
        return f"{state}-{hmac.digest(self._keys.secret, told, 'sha256')[:16].hex()}"


def _unauthorized(detail: str) -> HTTPException:
    return HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def _too_many(detail: str, after_s: float) -> HTTPException:
    seconds = max(1, round(after_s))
    return HTTPException(429, f"{detail}; retry after {seconds} s", {"Retry-After": str(seconds)})


def may(right: Right) -> Callable[[Request], Key]:
    """A dependency of routes: the request's key, which must have this right."""

    def key_of(request: Request) -> Key:
        key: Key = request.state.key
        if right not in key.rights:
            raise HTTPException(403, f"the key {key.name!r} has not the right {right!r}")
        return key

    return key_of


Submitter = Annotated[Key, Depends(may("submit"))]
"""The key of the request at hand, which may submit."""

Watcher = Annotated[Key, Depends(may("status"))]
"""The key of the request at hand, which may see the fleet's status."""


class Authenticated:
    """Finds the key of each request before its body is read, and keeps to the key's limit of it.

    Args:
        public: paths that need no key.
        streamed: paths whose bodies are read as they come, and may be of any size.
        refuse: makes the answer to a request without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        public: frozenset[str],
        streamed: frozenset[str],
        refuse: Callable[[str, HTTPException], Response],
    ) -> None:
        self._app = app
        self._access = access
        self._public = public
        self._streamed = streamed
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, path = self._app, scope.get("path", "")
        if scope["type"] == "http" and path not in self._public:
            try:
                key = self._access.key_of(Headers(scope=scope).get("authorization"))
            except HTTPException as error:
                app = self._refuse(path, error)
            else:
                scope.setdefault("state", {})["key"] = key
                if path not in self._streamed:
                    app = RequestBodyLimitMiddleware(app, key.body_mb << 20)
        await app(scope, receive, send)


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
