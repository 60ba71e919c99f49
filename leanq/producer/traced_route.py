"""A route that begins a trace for each request, or goes on with its caller's.

A reply brings what its worker measured, so the client can make every span of a request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from leanq.errors import LeanQError
from leanq.fleet.timeline import of_reply
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
        traced = self._traced[waiter] = _Traced(self, waiter, span, sent, where)
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
                if ran_to_ns := self._add_phases(traced, end):
                    self._tracer.add("reply", span, min(ran_to_ns, now_ns), now_ns)
        span.end(now_ns)

    def _add_phases(self, traced: _Traced, reply: Reply) -> int:
        """Adds what a reply tells of its request's time; returns when the run ended, 0 if there was
        none.

        The phases of the run stand below its own span, and what came before beside that.
        """
        found = of_reply(reply, None)
        if found is None or not found.attempts or "claimed" not in found.attempts[-1].phases_ms:
            return 0
        *lost, last = found.attempts
        sent, where = traced.sent or traced.span, traced.environment
        # The server counts whole milliseconds; a float has no room for nanoseconds.
        at_ns = round(found.submitted_s * 1000) * 1_000_000
        for attempt in lost:
            about = {"messaging.client.id": attempt.worker, "leanq.end": attempt.end}
            at_ns = self._add(attempt.phases_ms, sent, at_ns, about)
        phases = dict(last.phases_ms)
        at_ns = self._add({"waited": phases.pop("waited")}, sent, at_ns)
        attributes = {
            **message_attributes("process", where, reply.request_id),
            "messaging.client.id": reply.worker,
            "leanq.attempt": reply.attempts,
            "leanq.verdict": last.end,
        }
        name, kind = f"process {where}".rstrip(), self._tracer.kinds.CONSUMER
        process = self._tracer.begin(name, kind, traceparent_of(sent), attributes, start_ns=at_ns)
        at_ns = self._add(phases, process or sent, at_ns)
        if process:
            process.end(at_ns)
        return at_ns

    def _add(
        self,
        phases_ms: Mapping[str, float],
        below: Span,
        at_ns: int,
        about: Mapping[str, str] | None = None,
    ) -> int:
        """Adds phases one after the other, and returns when the last has ended."""
        for name, ms in phases_ms.items():
            until_ns = at_ns + round(ms * 1e6)
            self._tracer.add(name, below, at_ns, until_ns, about)
            at_ns = until_ns
        return at_ns


class _Traced(Struct, eq=False):
    """The waiter of a request whose trace is sampled."""

    route: TracedRoute
    waiter: Waiter
    span: Span
    sent: Span | None
    environment: str

    def end_sent(self) -> None:
        if self.sent and self.sent.is_recording():
            self.sent.end()

    def acknowledged(self) -> None:
        self.end_sent()
        self.waiter.acknowledged()

    def ended(self, end: Reply | LeanQError) -> None:
        self.route.ended(self, end)
        self.waiter.ended(end)
