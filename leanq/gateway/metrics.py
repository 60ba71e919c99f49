"""Measures the gateway's own work, for Prometheus, for traces and for load balancers."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leanq.errors import LeanQError
from leanq.fleet.prometheus import Sample, counted_samples
from leanq.fleet.stats import Times
from leanq.fleet.tracing import CALLER, Tracer, trace_id_of, traceparent_of, tracer
from leanq.gateway.client import GatewayClient
from leanq.gateway.fresh import FRESH_S, Fresh
from leanq.gateway.limits import Connections
from leanq.gateway.logs import CallerLog
from leanq.queue.metrics import BUCKETS_S, note_exemplar
from leanq.queue.requests import is_traceparent

log = logging.getLogger("leanq.gateway")

# The label of requests without a route; labels from paths would be unlimited.
_NO_ROUTE = "none"
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_TIMEOUT_S = 2.0
_LOST_S = 15.0


class GatewayMetrics:
    """The counts of one gateway; written in its event loop, read in any thread."""

    def __init__(self, lean: GatewayClient, connections: Connections, readiness: Readiness) -> None:
        self._lean = lean
        self._connections = connections
        self._readiness = readiness
        self._answers: Counter[tuple[str, str]] = Counter()
        self._took: defaultdict[str, Times] = defaultdict(Times)
        self.streams = 0

    def answered(self, route: str, status: int, took_s: float, trace_id: str = "") -> None:
        """Counts one answered HTTP request; ``trace_id`` if its trace is sampled."""
        if trace_id:
            note_exemplar(("leanq_http_request_seconds", route), trace_id, took_s)
        self._answers[route, str(status)] += 1
        times = self._took[route]
        times.counts[bisect_left(BUCKETS_S, took_s)] += 1
        times.sum_s += took_s

    def samples(self) -> Iterator[Sample]:
        for labels, count in list(self._answers.items()):
            yield "leanq_http_requests_total", labels, count
        for route, times in list(self._took.items()):
            yield "leanq_http_request_seconds", (route,), times
        yield "leanq_http_streams", (), self.streams
        yield "leanq_http_outstanding", (), self._lean.all_outstanding()
        yield "leanq_http_connections", (), len(self._connections.held)
        yield "leanq_http_connections_limit", (), self._connections.most
        yield "leanq_http_late_seconds_total", (), self._readiness.late_s
        yield from counted_samples()


class Called:
    """An HTTP request that asks for work, and its ``traceparent``.

    All that its task asks of the queue belongs to its trace, whose id is ``trace_id`` if it is
    sampled. Without a tracer it passes the caller's trace context on.
    """

    __slots__ = ("_span", "_token", "_tracer", "trace_id")

    def __init__(self, tracer: Tracer | None, scope: Scope) -> None:
        self._tracer, self._span, self.trace_id = tracer, None, ""
        given = ""
        for name, value in scope["headers"]:
            # A header that is none begins a new trace, as W3C has it.
            if name == b"traceparent" and is_traceparent(text := value.decode("latin-1")):
                given = text
        method = scope["method"]
        # Most others are looks, which say nothing of a request to the queue.
        if tracer is not None and method == "POST":
            about = {"http.request.method": method, "url.path": scope["path"]}
            self._span = tracer.begin(method, tracer.kinds.SERVER, given, about)
        if self._span is not None:
            given, self.trace_id = traceparent_of(self._span), trace_id_of(self._span)
        self._token = CALLER.set(given) if given else None

    def ended(self, route: str, status: int) -> None:
        if self._token is not None:
            CALLER.reset(self._token)
        if self._span is not None:
            self._span.update_name(f"POST {route}")
            self._span.set_attribute("http.route", route)
            self._span.set_attribute("http.response.status_code", status)
            if self._tracer and status >= 500:
                self._tracer.fail(self._span, str(status), "")
            self._span.end()


class Measured:
    """Counts and logs the answers of an application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = CallerLog()
        self._tracer = tracer("gateway")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        called = Called(self._tracer, scope)
        outside = len(scope.get("root_path", ""))
        status, streams = 500, False

        async def sending(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status = message["status"]
                streams = any(
                    name == b"content-type" and value.startswith(_STREAMS)
                    for name, value in message["headers"]
                )
                self._metrics.streams += streams
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._metrics.streams -= streams
            path = getattr(scope.get("route"), "path", None)
            route = _NO_ROUTE if path is None else scope.get("root_path", "")[outside:] + path
            took_s = time.monotonic() - began_s
            called.ended(route, status)
            self._metrics.answered(route, status, took_s, called.trace_id)
            self._log.answered(scope, route, status, took_s)


class Readiness:
    """Tells load balancers if this gateway takes requests; not once it is ``ending``.

    ``late_s``: how late ``watch`` woke, in seconds, all times together. Requests wait as long
    for their turns in the loop.
    """

    def __init__(self, lean: GatewayClient) -> None:
        self.ending = False
        self.late_s = 0.0
        self._lean = lean
        self._answering = Fresh(self._answers)

    async def is_ready(self) -> bool:
        """Returns True while the gateway goes on and its queue answered within the last second."""
        return await self._answering.get() and not self.ending

    async def watch(self) -> None:
        """Notes when the queue is lost and when it is back, for the log and for new requests."""
        while True:
            try:
                async with asyncio.timeout(_LOST_S):
                    trouble = await self._lean.trouble()
            except TimeoutError:
                trouble = f"no answer within {_LOST_S:g} s"
            if trouble and not self._lean.lost:
                log.error("the queue is lost, requests are answered with 503: %s", trouble)
            elif self._lean.lost and not trouble:
                log.warning("the queue answers again")
            self._lean.lost = trouble
            due_s = time.monotonic() + FRESH_S
            await asyncio.sleep(FRESH_S)
            self.late_s += max(0.0, time.monotonic() - due_s)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._lean.reach()
        except (LeanQError, TimeoutError):
            return False
        return True
