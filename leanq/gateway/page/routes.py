"""The page as an ASGI application, at ``/`` and below ``/page/``.

A session's cookie identifies a caller, or a key in the header as everywhere else. Every change is a
POST from this very page: its ``Origin`` must be there and must be this site.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from fastapi.sse import format_sse_event
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leanq import __version__
from leanq.errors import LeanQError
from leanq.fleet.shown import duration
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import client_gone
from leanq.gateway.keys import Key
from leanq.gateway.limits import Connections
from leanq.gateway.logs import OBJECT
from leanq.gateway.page.forms import read_form
from leanq.gateway.page.looks import EVERY_S, FleetLooks
from leanq.gateway.page.sections import SECTIONS, VERDICTS, Overview
from leanq.gateway.page.sessions import Sessions
from leanq.gateway.page.texts import visible
from leanq.gateway.page.viewers import Viewer
from leanq.gateway.problems import problem_of

BELOW = "/page/"
"""The page serves the paths below it."""

_LONGEST_LOGIN = 4096
# Fields of forms that say what is changed, for the log.
_CHANGED = ("request_id", "kind", "name", "paused", "tenant", "weight")
_LONGEST_NAME = 100
_MOST_WATCHERS = 1000
_MOST_WATCHERS_OF_KEY = 100
# Large parts change little; they are rendered, and sent, once in so many seconds.
_SLOW_S = {"history": 30.0}
_KEEP_ALIVE_S = 15.0
_RETRY_AFTER_S = 5

_HEADERS = {
    # Allow nothing but these files; no inline scripts or styles either.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With `no-referrer` browsers would send forms with an Origin of `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

_FOLDER = Path(__file__).parent

Handler = Callable[["Page", Request, Key, Viewer], Awaitable[Response]]
"""Answers one path; raises HTTPException (403) if the viewer may not call it."""


class Page:
    """The page of one gateway.

    Args:
        stopping: set once the gateway is told to end; watchers are then disconnected.
    """

    def __init__(
        self,
        lean: GatewayClient,
        access: Access,
        connections: Connections,
        stopping: asyncio.Event,
    ) -> None:
        self.lean = lean
        self.access = access
        self._connections = connections
        self._stopping = stopping
        self._sessions = Sessions(access)
        self.looks = FleetLooks(lean)
        # By the name of the key.
        self._watchers: Counter[str] = Counter()
        # Viewers with equal rights share one rendering.
        self._rendered: dict[tuple[Viewer, str], tuple[float, str]] = {}
        self._rendered_at_s = 0.0
        self._templates = _templates()

    def app(self, reads: Mapping[str, Handler], changes: Mapping[str, Handler]) -> ASGIApp:
        """Returns the application; both mappings are by the path below the page's."""
        routes: list[Route | Mount] = [
            Route("/login", self._login, methods=["POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Mount("/static", StaticFiles(directory=_FOLDER / "static")),
        ]
        for method, handlers in (("GET", reads), ("POST", changes)):
            routes += (
                Route(path, partial(self._handle, handler), methods=[method])
                for path, handler in handlers.items()
            )
        app = Starlette(
            routes=routes,
            exception_handlers={
                LeanQError: self._failed,
                StarletteHTTPException: self._failed,
                ClientDisconnect: client_gone,
            },
        )
        return _Guarded(app)

    def render(self, template: str, **context: Any) -> str:
        return self._templates.get_template(template).render(context)

    def page(
        self,
        request: Request,
        template: str,
        viewer: Viewer | None,
        status: int = 200,
        /,
        **context: Any,
    ) -> Response:
        root, here = _places(request)
        shown = {"viewer": viewer, "needs_keys": self.access.needs_keys, **context}
        return HTMLResponse(self.render(template, root=root, here=here, **shown), status)

    def away(self, request: Request, path: str) -> RedirectResponse:
        """Sends the caller to a path below the gateway's own."""
        return RedirectResponse(_places(request)[0] + path, 303)

    async def overview(self, viewer: Viewer) -> Overview:
        look = await self.looks.look()
        return Overview(look, self.lean.recent)

    def section(self, name: str, overview: Overview, viewer: Viewer) -> str:
        """Renders one part of the overview as HTML."""
        at_s = overview.look.at_s
        if self._rendered_at_s != at_s:
            self._rendered_at_s = at_s
            fresh_s = {name: at_s - seconds for name, seconds in _SLOW_S.items()}
            self._rendered = {
                (seen_by, part): (made_s, html)
                for (seen_by, part), (made_s, html) in self._rendered.items()
                if made_s > fresh_s.get(part, at_s)
            }
        if (viewer, name) not in self._rendered:
            context = {"viewer": viewer, **SECTIONS[name](overview, viewer)}
            html = self.render(f"sections/{name}.html", **context)
            self._rendered[viewer, name] = at_s, html
        return self._rendered[viewer, name][1]

    async def _handle(self, handler: Handler, request: Request) -> Response:
        key = self._sessions.key_of(request)
        if key is None:
            is_script = "hx-request" in request.headers or request.url.path.endswith("/events")
            if request.method == "POST" or is_script:
                raise HTTPException(401, "the session has ended; load the page again")
            return self.page(request, "login.html", None, wrong=False)
        request.state.key = key
        with self._connections.carrying(key.name):
            return await handler(self, request, key, self._viewer(key))

    def _viewer(self, key: Key) -> Viewer:
        return Viewer.of(key, needs_keys=self.access.needs_keys)

    async def _login(self, request: Request) -> Response:
        with self._connections.carrying(""):
            form = await read_form(request, _LONGEST_LOGIN)
        key = self._sessions.key_given(form.get("key", "").strip())
        if key is None or not self.access.needs_keys:
            return self.page(request, "login.html", None, 403, wrong=True)
        response = self.away(request, "")
        self._sessions.begin(request, response, key)
        request.state.key = key
        return response

    async def _logout(self, request: Request) -> Response:
        response = self.away(request, "")
        self._sessions.end(request, response)
        request.state.key = self._sessions.key_of(request)
        return response

    async def _failed(self, request: Request, error: Exception) -> Response:
        status, detail, headers = _told(error)
        is_script = "hx-request" in request.headers
        if is_script or "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(detail, status, headers)
        key = self._sessions.key_of(request) if status != 401 else None
        viewer = self._viewer(key) if key else None
        response = self.page(request, "error.html", viewer, status, detail=detail)
        response.headers.update(headers)
        if status == 503 and request.method == "GET":
            # The browser asks again by itself, until the queue is back.
            response.headers["Refresh"] = str(_RETRY_AFTER_S)
        return response

    async def watched(self, viewer: Viewer, request: Request) -> AsyncIterator[bytes]:
        """Yields an event for each part of the overview that has changed.

        Ends when the gateway ends or the caller may no longer watch.
        """
        sent: dict[str, str] = {}
        silent_s = 0.0
        while not self._stopping.is_set():
            key = self._sessions.key_of(request)
            if key is None or self._viewer(key) != viewer:
                yield format_sse_event(event="ended", data_str="the session has ended")
                return
            try:
                overview = await self.overview(viewer)
            except LeanQError as error:
                yield format_sse_event(event="trouble", data_str=str(visible(_told(error)[1])))
            else:
                changed = [
                    (name, html)
                    for name in SECTIONS
                    if (html := self.section(name, overview, viewer)) != sent.get(name)
                ]
                sent.update(changed)
                silent_s = 0.0 if changed else silent_s + EVERY_S
                for name, html in changed:
                    yield format_sse_event(event=name, data_str=html)
                if silent_s >= _KEEP_ALIVE_S:
                    silent_s = 0.0
                    yield format_sse_event(comment="")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._stopping.wait()

    async def form(self, request: Request, key: Key) -> dict[str, str]:
        """Reads the fields of a form that came with a key; raises as ``read_form``, and
        HTTPException (429) if the tenant's bodies take too much memory."""
        with self.access.body(key) as note:
            form = await read_form(request, key.body_mb << 20, note)
        changed = {name: form[name][:_LONGEST_NAME] for name in _CHANGED if name in form}
        request.scope["state"][OBJECT] = changed
        return form

    @contextlib.contextmanager
    def watching(self, key: Key) -> Iterator[None]:
        """Counts a page that watches; raises HTTPException (503) if no further one may."""
        after = {"Retry-After": str(_RETRY_AFTER_S)}
        if self._watchers.total() >= _MOST_WATCHERS:
            raise HTTPException(503, f"{_MOST_WATCHERS} pages watch this gateway already", after)
        if self.access.needs_keys and self._watchers[key.name] >= _MOST_WATCHERS_OF_KEY:
            text = f"{_MOST_WATCHERS_OF_KEY} pages watch this gateway with this key already"
            raise HTTPException(503, text, after)
        self._watchers[key.name] += 1
        try:
            yield
        finally:
            self._watchers[key.name] -= 1


@cache
def _templates() -> Environment:
    """Returns all templates. To compile them for a first caller would stop the loop for 70 ms."""
    made = Environment(
        loader=PackageLoader("leanq.gateway.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "clock": lambda at_s: time.strftime("%H:%M", time.gmtime(at_s)),
        "duration": _brief,
        "age": lambda at_s: _brief(time.time() - at_s),
        "number": lambda n: "–" if n is None else f"{n:,}",
        "rate": lambda n: "–" if n is None else f"{n:,.1f}",
        "percent": lambda n: "–" if n is None else f"{100 * n:.1f} %",
        "visible": visible,
        "path": lambda text: quote(text, safe=""),
    }
    made.globals |= {"version": __version__, "static": _static_url, "known_verdicts": VERDICTS}
    for name in made.list_templates(["html"]):
        made.get_template(name)
    return made


class _Guarded:
    """Adds the page's headers to each answer, and refuses changes from other pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_static = "/static/" in scope.get("path", "")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["Cache-Control"] = "public, max-age=86400" if is_static else "no-store"
            await send(message)

        app = self._app
        changes = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD")
        # The gateway has already checked that an Origin, if there is one, is this site.
        if changes and not any(name == b"origin" for name, _ in scope["headers"]):
            app = PlainTextResponse("a change needs the Origin that browsers send", 403)
        await app(scope, receive, guarded)


def _places(request: Request) -> tuple[str, str]:
    """Returns where the gateway is as seen from a page, and the page as seen from there. A proxy
    may have taken a path away that comes before both, so links and redirects are relative."""
    here = request.scope["raw_path"].decode("ascii", "replace").lstrip("/")
    return "../" * here.count("/") or "./", here


def _told(error: Exception) -> tuple[int, str, dict[str, str]]:
    """Returns the HTTP status of an error, its text for callers, and headers."""
    problem = problem_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if problem["status"] in (429, 503):
        headers.setdefault("Retry-After", str(_RETRY_AFTER_S))
    return problem["status"], problem["detail"], headers


def _brief(seconds: float | None) -> str:
    """Formats a duration; in milliseconds below a second, since most checks are."""
    if seconds is None:
        return "–"
    return f"{1000 * max(0.0, seconds):.0f} ms" if seconds < 0.9995 else duration(seconds)


def _static_url(name: str) -> str:
    return f"page/static/{name}?v={_VERSIONS[name]}"


_VERSIONS = {
    str(path.relative_to(_FOLDER / "static")): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    for path in (_FOLDER / "static").rglob("*")
    if path.is_file()
}
