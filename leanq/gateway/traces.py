"""The trace that an HTTP request belongs to."""

from __future__ import annotations

from starlette.types import Scope

from leanq.fleet.tracing import CALLER, Tracer, trace_id_of, traceparent_of
from leanq.queue.requests import is_traceparent


class Called:
    """An HTTP request that asks for work, and its ``traceparent``.

    All that its task asks of the queue belongs to its trace. Without a tracer it passes the
    caller's trace context on.

    Attributes:
        trace_id: the id of its trace, if that is sampled; else "".
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
        """Notes the answer's end."""
        if self._token is not None:
            CALLER.reset(self._token)
        if self._span is not None:
            self._span.update_name(f"POST {route}")
            self._span.set_attribute("http.route", route)
            self._span.set_attribute("http.response.status_code", status)
            if self._tracer and status >= 500:
                self._tracer.fail(self._span, str(status), "")
            self._span.end()
