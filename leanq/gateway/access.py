"""Decides who calls and what they may do: keys, limits, and refusals of browsers.

Nothing here looks at a request's address, or at the headers that proxies add.
"""

from __future__ import annotations

import contextlib
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request, Response
from fastapi.datastructures import Headers
from fastapi.responses import PlainTextResponse
from msgspec.structs import replace
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leanq.errors import UnknownStateError
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import Key, KeyFile, Right
from leanq.gateway.limits import Connections
from leanq.queue.metrics import count
from leanq.queue.requests import Reply

# Clients of 1.x send these when they have no key.
_NO_KEYS = frozenset({"", "None", "null"})
_STATE_LENGTH = 64
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# The server keeps as much for a client that reads slowly, and then waits for it.
_UNSENT_BYTES = 65_536
_RETRY_AFTER_S = 1.0


class Access:
    """The gateway's rules of who may do what. Without ``keys`` every caller is this machine's user;
    ``environment`` is the default of keys that name none."""

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
        # By the key's name: how many requests it may send at once (below 0 if it sent more), and
        # the time of that count.
        self._allowance: dict[str, tuple[float, float]] = {}
        # By tenant, what `holding` counts.
        self._held: Counter[str] = Counter()
        self._held_bytes: Counter[str] = Counter()

    def key_of(self, authorization: str | None) -> Key:
        """Returns the key in an ``Authorization`` header; raises HTTPException (401)."""
        if self._keys is None:
            return self._open
        secret = (authorization or "").strip()
        scheme, _, rest = secret.partition(" ")
        if scheme.lower() == "bearer":
            secret = rest.strip()
        if secret in _NO_KEYS:
            count("leanq_http_refusals_total", "no key")
            raise _unauthorized("Missing API key")
        key = self._keys.find(secret)
        if key is None:
            count("leanq_http_refusals_total", "unknown key")
            raise _unauthorized("Invalid API key")
        return key

    def key_named(self, name: str) -> Key | None:
        """Returns the key that has this name now, or the common key if there is no file of keys."""
        return self._open if self._keys is None else self._keys.named(name)

    def renewed(self, key: Key, right: Right) -> Key:
        """Returns the present form of a key, for work that outlasts a request.

        Raises HTTPException: 401, the key is gone or another tenant's; 403, it lost the right.
        """
        if self._keys is None:
            return key
        now = self._keys.renewed(key)
        if now is None or now.tenant != key.tenant:
            count("leanq_http_refusals_total", "unknown key")
            raise _unauthorized("Invalid API key")
        _check_right(now, right)
        return now

    @property
    def needs_keys(self) -> bool:
        """True if callers need a key; if not, every caller is this machine's user."""
        return self._keys is not None

    def signature(self, text: str) -> str:
        """Returns a signature of ``text`` that gateways with the same secret can check."""
        secret = self._keys.secret if self._keys else b""
        return hmac.digest(secret, text.encode(errors="replace"), "sha256").hex()

    def environment(self, key: Key, wanted: str | None) -> str:
        """Returns the environment that a request means; raises HTTPException (403)."""
        if wanted is None:
            return key.environments[0] if key.environments else self._environment
        if key.environments and wanted not in key.environments:
            allowed = ", ".join(key.environments)
            count("leanq_http_refusals_total", "environment")
            raise HTTPException(
                403, f"the key may not use the environment {wanted!r:.80}; it may use: {allowed}"
            )
        return wanted

    def admit(self, key: Key, number: int, lean: GatewayClient) -> None:
        """Admits so many more requests, counting the outstanding ones of the key's tenant.

        Raises HTTPException: 429, a limit is reached; 413, the number can never fit it.
        """
        check_number(key, number)
        if wait := self.wait_for(key, number, lean):
            limit, detail, after_s = wait
            count("leanq_http_refusals_total", limit)
            raise _too_many(detail, after_s)

    def wait_for(self, key: Key, number: int, lean: GatewayClient) -> tuple[str, str, float] | None:
        """Returns the limit that so many more requests would exceed, a message, and a delay.

        After the delay (seconds) the caller may try again. Returns None if the requests are
        admitted.
        """
        outstanding = lean.outstanding(key.tenant) + self._held[key.tenant]
        held_bytes = lean.outstanding_bytes(key.tenant) + self._held_bytes[key.tenant]
        if held_bytes > key.outstanding_mb << 20:
            return "outstanding bytes", _too_many_bytes(key), _RETRY_AFTER_S
        if outstanding + number > key.outstanding:
            detail = (
                f"{outstanding} requests of the tenant are outstanding, and the key allows "
                f"{key.outstanding}"
            )
            return "outstanding", detail, _RETRY_AFTER_S
        if key.rate_per_s is None:
            return None
        now_s = self._clock()
        most = max(1.0, key.rate_per_s)
        allowed, at_s = self._allowance.get(key.name, (most, now_s))
        allowed = min(most, allowed + (now_s - at_s) * key.rate_per_s)
        # Admit a batch larger than a second's allowance; later requests wait for it.
        if allowed < min(number, most):
            wait_s = (min(number, most) - allowed) / key.rate_per_s
            return "rate", f"the key allows {key.rate_per_s:g} requests a second", wait_s
        self._allowance[key.name] = allowed - number, now_s
        return None

    def check_memory(self, key: Key, more_bytes: int = 0) -> None:
        """Raises HTTPException (429) if the tenant's bodies and answers take too much memory."""
        if self._held_bytes[key.tenant] + more_bytes > key.outstanding_mb << 20:
            count("leanq_http_refusals_total", "outstanding bytes")
            raise _too_many(_too_many_bytes(key), _RETRY_AFTER_S)

    @contextlib.contextmanager
    def body(self, key: Key) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of an HTTP request's body while it is held.

        Yields a function that notes further bytes. It raises HTTPException (429) if the tenant's
        bodies take too much memory.
        """
        with self.holding(key) as hold:

            def note(more_bytes: int) -> None:
                # A body that is refused does not count, or it would have answers refused, too.
                self.check_memory(key, more_bytes)
                hold(0, more_bytes)

            yield note

    @contextlib.contextmanager
    def holding(self, key: Key) -> Iterator[Callable[[int, int], None]]:
        """Counts requests and bytes of the key's tenant that a gateway holds beside those that it
        waits for: texts that come in, and results until their reader takes them.

        Yields a function that notes so many more requests and bytes, or fewer.
        """
        tenant, number, held_bytes = key.tenant, 0, 0

        def note(more: int, more_bytes: int) -> None:
            nonlocal number, held_bytes
            number += more
            held_bytes += more_bytes
            self._held[tenant] += more
            self._held_bytes[tenant] += more_bytes

        try:
            yield note
        finally:
            note(-number, -held_bytes)
            for counts in (self._held, self._held_bytes):
                if not counts[tenant]:
                    del counts[tenant]

    def sealed(self, key: Key, reply: Reply) -> Reply:
        """Returns the reply with states that only the key's tenant can use."""
        if reply.state is None and not reply.sorries:
            return reply
        sorries = tuple(
            replace(sorry, state=sorry.state and self._seal(key, sorry.state))
            for sorry in reply.sorries
        )
        return replace(reply, sorries=sorries, state=reply.state and self._seal(key, reply.state))

    def state(self, key: Key, sealed: str) -> str:
        """Returns the state that the tenant was given as ``sealed``; raises UnknownStateError."""
        state = sealed[:_STATE_LENGTH]
        # compare_digest takes text only if it is ASCII, so compare bytes.
        if not hmac.compare_digest(
            self._seal(key, state).encode("utf8", "replace"), sealed.encode("utf8", "replace")
        ):
            raise UnknownStateError(f"the state {sealed!r:.100} is not known to this key's tenant")
        return state

    def _seal(self, key: Key, state: str) -> str:
        if self._keys is None:
            return state
        return f"{state}-{self.signature(f'{key.tenant} {state}')[:32]}"


def check_number(key: Key, number: int) -> None:
    if number > key.outstanding:
        count("leanq_http_refusals_total", "size of the batch")
        raise HTTPException(
            413,
            f"{number} requests at once, and the key allows {key.outstanding} outstanding "
            "ones; send smaller batches",
        )


def _unauthorized(detail: str) -> HTTPException:
    return HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def _too_many_bytes(key: Key) -> str:
    return f"the tenant's texts take the {key.outstanding_mb} MiB that the key allows"


def _too_many(detail: str, after_s: float) -> HTTPException:
    seconds = max(1, round(after_s))
    return HTTPException(429, f"{detail}; retry after {seconds} s", {"Retry-After": str(seconds)})


def may(right: Right) -> Callable[[Request], Awaitable[Key]]:
    """Returns a dependency of routes: the request's key, which must have this right."""

    # Asynchronous, since FastAPI runs other dependencies in a thread.
    async def key_of(request: Request) -> Key:
        key: Key = request.state.key
        _check_right(key, right)
        return key

    return key_of


def _check_right(key: Key, right: Right) -> None:
    if right not in key.rights:
        count("leanq_http_refusals_total", "right")
        raise HTTPException(403, f"the key {key.name!r} has not the right {right!r}")


Submitter = Annotated[Key, Depends(may("submit"))]
"""The key of the request at hand, which may submit."""

Watcher = Annotated[Key, Depends(may("status"))]
"""The key of the request at hand, which may see the fleet's status."""


@dataclass(frozen=True, eq=False)
class Authenticated:
    """Finds the key of each request before its body is read; bounds the body by the key.

    Attributes:
        connections: the gateway's connections.
        public: paths that need no key.
        apart: applications below this path identify their callers themselves.
        streamed: paths whose bodies are read as they come, and may have any size.
        refuse: makes the answer to a request without a key.
    """

    app: ASGIApp
    access: Access
    connections: Connections
    public: frozenset[str]
    apart: str
    streamed: frozenset[str]
    refuse: Callable[[str, HTTPException], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_public = path in self.public or path.startswith(self.apart)
        if scope["type"] != "http" or is_public:
            await self.app(scope, receive, send)
            return
        streams = path in self.streamed
        with contextlib.ExitStack() as under_way:
            try:
                key = self.access.key_of(Headers(scope=scope).get("authorization"))
                under_way.enter_context(self.connections.carrying(key.name))
            except HTTPException as error:
                await self.refuse(path, error)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key

            async def sending(message: Message) -> None:
                if len(message.get("body", b"")) > _UNSENT_BYTES:
                    await send({**message, "more_body": True})
                    # The server sends it once its client has taken nearly all before it.
                    message = {**message, "body": b""}
                await send(message)

            if streams:
                await self.app(scope, receive, sending)
                return
            note = under_way.enter_context(self.access.body(key))
            app = RequestBodyLimitMiddleware(self.app, key.body_mb << 20)
            hold = under_way.enter_context(self.access.holding(key))

            async def refuse() -> bool:
                try:
                    self.access.check_memory(key)
                except HTTPException as error:
                    await self.refuse(path, error)(scope, receive, send)
                    return True
                return False

            async def noted() -> Message:
                message = await receive()
                if body := message.get("body"):
                    note(len(body))
                return message

            await app(scope, noted, _held(sending, hold, refuse))


def _held(
    send: Send, hold: Callable[[int, int], None], refuse: Callable[[], Awaitable[bool]]
) -> Send:
    """Counts the bytes of each part of an answer while it is sent.

    If the tenant's take too much memory, ``refuse`` sends another answer and returns True.
    """
    start: Message | None = None
    is_refused = False

    async def send_held(message: Message) -> None:
        nonlocal start, is_refused
        if message["type"] == "http.response.start":
            start = message
            return
        if start:
            begun, start = start, None
            is_refused = await refuse()
            if not is_refused:
                await send(begun)
        if not is_refused:
            size_bytes = len(message.get("body", b""))
            hold(0, size_bytes)
            await send(message)
            hold(0, -size_bytes)

    return send_held


class Screened:
    """Refuses a request that states its length twice, or that another site's page makes a browser
    send.

    A proxy in front may believe the other length. It would then forward bytes as a body that the
    gateway reads as a request, on a connection that the proxy's callers share.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if "content-length" in headers and "transfer-encoding" in headers:
                count("leanq_http_refusals_total", "length")
                app = PlainTextResponse(
                    "Content-Length and Transfer-Encoding exclude each other",
                    400,
                    {"Connection": "close"},
                )
            elif origin is not None and not _is_of(headers.get("host", ""), origin):
                count("leanq_http_refusals_total", "origin")
                app = PlainTextResponse("requests of other sites' pages are refused", 403)
        await app(scope, receive, send)


def _is_of(host: str, origin: str) -> bool:
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    # Browsers reach the page over TLS, which a proxy ends, except on this machine.
    schemes = ("http", "https") if is_loopback_name(host) else ("https",)
    return found.scheme in schemes and found.netloc.lower() == host.lower()


def is_loopback_name(host: str) -> bool:
    """Returns True if a ``Host`` header names the caller's own machine."""
    try:
        return urlsplit(f"//{host}").hostname in _LOOPBACK
    except ValueError:
        return False
