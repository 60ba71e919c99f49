"""Sessions of browsers, which cannot send a key with each request.

A browser gives its key once and gets a cookie instead. Scripts cannot read the cookie, and no other
site's page makes the browser send it. It names the key and its own end, and is signed with the
secret of the file of keys. So any gateway with that file knows it and none has to keep it. It ends
with its key.
"""

from __future__ import annotations

import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable

from fastapi import HTTPException, Request, Response

from leanq.gateway.access import Access, is_loopback_name
from leanq.gateway.keys import Key

SESSION_S = 7 * 86_400
_COOKIE = "leanq-session"


class Sessions:
    """Finds the caller of the page. ``clock`` tells seconds since 1970."""

    def __init__(self, access: Access, clock: Callable[[], float] = time.time) -> None:
        self._access = access
        self._clock = clock

    def key_of(self, request: Request) -> Key | None:
        """Returns the key of a request, None without one; raises HTTPException (401)."""
        if not self._access.needs_keys or "authorization" in request.headers:
            return self._access.key_of(request.headers.get("authorization"))
        return self._key_in(request.cookies.get(_cookie_of(request), ""))

    def key_given(self, secret: str) -> Key | None:
        """Returns the key that somebody has typed, if it is known."""
        try:
            return self._access.key_of(f"Bearer {secret}")
        except HTTPException:
            return None

    def begin(self, request: Request, response: Response, key: Key) -> None:
        until = int(self._clock()) + SESSION_S
        name = urlsafe_b64encode(key.name.encode()).decode()
        token = f"{name}.{until}.{self._signature(key, until)}"
        self._set(request, response, token, SESSION_S)

    def end(self, request: Request, response: Response) -> None:
        self._set(request, response, "", 0)

    def _set(self, request: Request, response: Response, value: str, max_age_s: int) -> None:
        response.set_cookie(
            _cookie_of(request),
            value,
            max_age=max_age_s,
            path="/",
            secure=not _on_loopback(request),
            httponly=True,
            samesite="strict",
        )

    def _signature(self, key: Key, until: int) -> str:
        # The hash keeps another key of the same name from taking the session over. The secret also
        # signs states of tenants, but no tenant's name has a zero byte.
        return self._access.signature(f"session\0{key.name}\0{key.sha256}\0{until}")

    def _key_in(self, token: str) -> Key | None:
        try:
            encoded, until, signature = token.split(".")
            key = self._access.key_named(urlsafe_b64decode(encoded).decode())
            ends = int(until)
        except ValueError:
            return None
        if key is None or ends < self._clock():
            return None
        same = hmac.compare_digest(self._signature(key, ends).encode(), signature.encode())
        return key if same else None


def _on_loopback(request: Request) -> bool:
    """Returns True if the browser calls its own machine, where there may be no TLS.

    The gateway has checked the header that says so.
    """
    return is_loopback_name(request.headers.get("host", ""))


def _cookie_of(request: Request) -> str:
    # With this prefix browsers accept the cookie only over TLS, and only from this host.
    return _COOKIE if _on_loopback(request) else f"__Host-{_COOKIE}"
