"""A route that begins a trace for each request, or goes on with its caller's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from leanq.errors import LeanQError
from leanq.fleet.tracing import Tracer, message_attributes, traceparent_of
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.route import Route, Waiter
from leanq.queue import wire
from leanq.queue.requests import Reply

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class TracedRoute:
    """Makes the spans of a client around another route.

    ``begins``: whether requests without a caller's trace get one of their own.
    """

    def __init__(self, route: Route, tracer: Tracer, *, begins: bool) -> None:
        self.route = route
        self._begins = begins
        self._tracer = tracer
        self._traced: dict[Waiter, _Traced] = {}

    async def open(self) -> None:
        await self.route.open()

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        request, submission, kinds = prepared.request, prepared.submission, self._tracer.kinds
        where, request_id = submission.environment, submission.request_id
        about: dict[str, str | int] = {
            "leanq.operation": request.op,
            "leanq.tenant": submission.tenant,
        }
        if request.campaign:
            about["leanq.campaign"] = request.campaign
        parent, span = request.traceparent, None
        if parent or self._begins:
            span = self._tracer.begin(f"{request.op} {where}".rstrip(), kinds.CLIENT, parent, about)
        if span is None:
            self.route.send(prepared, waiter)
            return
        attributes = message_attributes("send", where, request_id)
        attributes["messaging.message.body.size"] = len(submission.body)
        sent = self._tracer.begin(
            f"send {where}".rstrip(), kinds.PRODUCER, traceparent_of(span), attributes
        )
        # Workers and the queue belong to what was sent. A trainer's own sampler may leave that out.
        request = replace(request, traceparent=traceparent_of(sent or span))
        submission = replace(submission, body=wire.pack_request(request))
        traced = self._traced[waiter] = _Traced(self, waiter, span, sent)
        self.route.send(replace(prepared, request=request, submission=submission), traced)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        self.route.attach(request_id, waiter)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        traced = self._traced.pop(waiter, None)
        if traced is None:
            return self.route.cancel(request_id, waiter)
        traced.end_sent()
        traced.span.set_attribute("leanq.verdict", "cancelled")
        traced.span.end()
        return self.route.cancel(request_id, traced)

    async def close(self, *, withdraw: bool) -> None:
        await self.route.close(withdraw=withdraw)

    def ended(self, traced: _Traced, end: Reply | LeanQError) -> None:
        self._traced.pop(traced.waiter, None)
        span, now_ns = traced.span, time.time_ns()
        traced.end_sent()
        if isinstance(end, LeanQError):
            self._tracer.fail(span, type(end).__name__, str(end))
        else:
            about = {"verdict": end.verdict, "reason": end.reason, "attempts": end.attempts}
            span.set_attributes({f"leanq.{k}": v for k, v in about.items() if v is not None})
            if spent := end.spent:
                if spent.traceparent:
                    self._tracer.link(span, spent.traceparent)
                if spent.claimed_ms:
                    ran_to_ns = (spent.claimed_ms * 1000 + spent.held_us) * 1000
                    ran_to_ns += round(end.wall_s * 1e9)
                    self._tracer.add("reply", span, min(ran_to_ns, now_ns), now_ns)
        span.end(now_ns)


class _Traced(Struct, eq=False):
    """The waiter of a request whose trace is sampled."""

    route: TracedRoute
    waiter: Waiter
    span: Span
    sent: Span | None

    def end_sent(self) -> None:
        if self.sent and self.sent.is_recording():
            self.sent.end()

    def acknowledged(self) -> None:
        self.end_sent()
        self.waiter.acknowledged()

    def ended(self, end: Reply | LeanQError) -> None:
        self.route.ended(self, end)
        self.waiter.ended(end)
