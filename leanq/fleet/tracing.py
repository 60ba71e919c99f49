"""Traces by OpenTelemetry, if the standard ``OTEL_*`` variables ask for them (``leanq[otel]``).

Spans wait in a bounded queue, and a thread sends them in batches by OTLP over HTTP. If the queue is
full or nobody takes a batch, spans are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from leanq import __version__
from leanq.errors import to_install
from leanq.queue.metrics import COUNTS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext, SpanKind
    from opentelemetry.trace import Tracer as OtelTracer

log = logging.getLogger("leanq.tracing")

CALLER: ContextVar[str] = ContextVar("leanq_caller", default="")
"""The trace context of the HTTP request that a gateway's task serves, as W3C writes it."""

Role = Literal["client", "gateway"]

_DROPPED = "leanq_spans_dropped_total"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
# A process that ends waits so long for the last batch.
_TIMEOUT_S = 3.0
_REFUSED = "OpenTelemetry refuses its variables: {}"


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment asks for traces: by an exporter or by an endpoint."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporter := environ.get("OTEL_TRACES_EXPORTER"):
        return exporter != "none"
    return any(environ.get(name) for name in _ENDPOINTS)


def why_not(environ: Mapping[str, str]) -> str:
    """Returns why traces that are asked for cannot be sent; "" if they can."""
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter != "otlp":
        return f"OTEL_TRACES_EXPORTER is {exporter!r:.40}; leanq sends by 'otlp' alone"
    protocol = next((value for name in _PROTOCOLS if (value := environ.get(name))), "")
    if protocol not in ("", "http/protobuf"):
        return f"the OTLP protocol is {protocol!r:.40}; leanq speaks 'http/protobuf' alone"
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        return f"OpenTelemetry's SDK is not installed: {to_install('otel')}"
    except ValueError as error:
        return _REFUSED.format(error)
    return ""


def tracer(role: Role = "client") -> Tracer | None:
    """Returns what makes this process's spans; None unless traces are asked for and can be sent.

    The first call decides for the process. A client in a process that has set up OpenTelemetry
    uses that.
    """
    if not _made:
        _made.append(_tracer_for(role))
    return _made[0]


_made: list[Tracer | None] = []


def _tracer_for(role: Role) -> Tracer | None:
    if not is_asked_for(os.environ):
        return None
    if why := why_not(os.environ):
        log.warning("no traces are sent: %s", why)
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    if role != "client" or not isinstance(provider, TracerProvider):
        try:
            provider = _provider(role)
        except ValueError as error:
            log.warning("no traces are sent: %s", _REFUSED.format(error))
            return None
    return Tracer(provider.get_tracer("leanq", __version__), provider.force_flush)


def flush() -> None:
    """Sends the spans that wait; for processes that end without Python's own end."""
    if _made and (made := _made[0]):
        made.flush()


def caller() -> str:
    """Returns the trace context of whoever makes a request now, as W3C writes it; "" for none.

    In a gateway that is the HTTP request; in a client the caller's own current span.
    """
    if given := CALLER.get():
        return given
    if tracer() is None:
        return ""
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return _written(context) if context.is_valid else ""


class Tracer:
    """Makes the spans of one process; ``flush`` sends those that wait."""

    def __init__(self, made_by: OtelTracer, flush: Callable[[], object]) -> None:
        from opentelemetry import trace

        self.flush = flush
        self._made_by = made_by
        self._trace = trace
        self.kinds = trace.SpanKind

    def begin(
        self,
        name: str,
        kind: SpanKind,
        parent: str,
        attributes: Mapping[str, str | int],
        *,
        start_ns: int | None = None,
    ) -> Span | None:
        """Begins a span; returns None if its trace is not sampled.

        ``parent`` is a trace context as W3C writes it; without one ("") a trace begins.
        """
        context = None
        if parent:
            remote = self._trace.NonRecordingSpan(self._read(parent))
            context = self._trace.set_span_in_context(remote)
        span = self._made_by.start_span(name, context, kind, attributes, start_time=start_ns)
        return span if span.is_recording() else None

    def add(
        self,
        name: str,
        parent: Span,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        context = self._trace.set_span_in_context(parent)
        made = self._made_by.start_span(name, context, attributes=attributes, start_time=start_ns)
        made.end(end_ns)

    def link(self, span: Span, to: str) -> None:
        """Links the span to one of another trace; does nothing if it is of the same."""
        context = self._read(to)
        if context.trace_id != span.get_span_context().trace_id:
            span.add_link(context)

    def fail(self, span: Span, error: str, text: str) -> None:
        """Notes that the span's work failed."""
        span.set_attribute("error.type", error)
        span.set_status(self._trace.StatusCode.ERROR, text)

    def _read(self, traceparent: str) -> SpanContext:
        _, trace_id, span_id, flags = traceparent.split("-")
        flags_ = self._trace.TraceFlags(int(flags, 16))
        return self._trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, flags_)


def is_sampled(traceparent: str) -> bool:
    return bool(traceparent) and bool(int(traceparent[-2:], 16) & 1)


def traceparent_of(span: Span) -> str:
    """Returns the trace context of what happens on behalf of the span, as W3C writes it."""
    return _written(span.get_span_context())


def trace_id_of(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"


def trace_id_in(traceparent: str) -> str:
    return traceparent.split("-")[1]


def message_attributes(
    operation: Literal["send", "process"], environment: str, request_id: str
) -> dict[str, str | int]:
    """Returns the attributes of a message, by the semantic conventions for messaging."""
    return {
        "messaging.system": "leanq",
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": environment,
        "messaging.message.id": request_id,
    }


def _written(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _provider(role: Role) -> TracerProvider:
    """Returns a provider that sends to the endpoint, with the sampler that the variables name."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    class Counted(OTLPSpanExporter):
        """Sends spans, and counts those that nobody takes."""

        def __init__(self) -> None:
            # Each batch is sent, or given up, within this time.
            timeout_s = None if any(os.environ.get(n) for n in _TIMEOUTS) else _TIMEOUT_S
            super().__init__(timeout=timeout_s)
            self._lock = threading.Lock()
            self.most = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or 2048)
            self.outstanding = 0
            self.ends = self._failed = False
            os.register_at_fork(after_in_child=self._forked)

        def takes(self) -> bool:
            """Counts one more span that is to be sent, or that is dropped."""
            with self._lock:
                if self.outstanding >= self.most:
                    COUNTS[_DROPPED, "queue_full"] += 1
                    return False
                self.outstanding += 1
            return True

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            try:
                if not (self.ends and self._failed):
                    result = super().export(spans)
            finally:
                self._failed = result is not SpanExportResult.SUCCESS
                with self._lock:
                    self.outstanding -= len(spans)
                    if self._failed:
                        COUNTS[_DROPPED, "not_taken"] += len(spans)
            return result

        def shutdown(self) -> None:
            super().shutdown()  # type: ignore[no-untyped-call]
            if dropped := sum(n for name, n in COUNTS.items() if name[0] == _DROPPED):
                log.warning("%d spans were not sent", dropped)

        def _forked(self) -> None:
            self._lock = threading.Lock()
            self.outstanding = 0

    class Bounded(BatchSpanProcessor):
        """Has a thread send the spans in batches, and never waits for it."""

        def __init__(self) -> None:
            self._counted = Counted()
            super().__init__(self._counted)

        def on_end(self, span: ReadableSpan) -> None:
            if self._counted.takes():
                super().on_end(span)

        def shutdown(self) -> None:
            self._counted.ends = True
            super().shutdown()  # type: ignore[no-untyped-call]

    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {SERVICE_NAME: f"leanq-{role}"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(Bounded())
    return provider
