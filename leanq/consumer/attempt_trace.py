"""The spans of one attempt at a request, made after it has run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from leanq.fleet import logging as logs
from leanq.fleet.timeline import of_reply
from leanq.fleet.tracing import (
    Tracer,
    is_sampled,
    message_attributes,
    trace_id_of,
    traceparent_of,
)
from leanq.queue import wire
from leanq.queue.metrics import note_exemplar
from leanq.queue.results import Job

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class AttemptTrace:
    """An attempt whose trace is sampled, from its run to its settlement."""

    def __init__(self, tracer: Tracer, job: Job, parent: str, span: Span) -> None:
        self.traceparent = traceparent_of(span)
        self._tracer, self._job, self._parent, self._span = tracer, job, parent, span

    @classmethod
    def begin(cls, tracer: Tracer, job: Job, worker: str, outcome: str) -> Self | None:
        """Returns the trace of the attempt that this task has run; None if it is not sampled."""
        about = logs.ABOUT.get()
        if about is None or not is_sampled(about.traceparent):
            return None
        attributes = {
            **message_attributes("process", job.environment, job.request_id),
            "messaging.client.id": worker,
            "leanq.attempt": job.attempts,
            "leanq.verdict": outcome,
        }
        name, kind = f"process {job.environment}", tracer.kinds.CONSUMER
        start_ns = job.claimed_ms * 1_000_000
        span = tracer.begin(name, kind, about.traceparent, attributes, start_ns=start_ns)
        if span is None:
            return None
        note_exemplar(("leanq_worker_requests_total", outcome), trace_id_of(span), 1.0)
        return cls(tracer, job, about.traceparent, span)

    def settled(self, reply: bytes, *, accepted: bool) -> None:
        """Ends the attempt's span now, and adds the phases that its packed reply tells.

        ``accepted``: whether the reply counted.
        """
        job = self._job
        settled_ms = job.claimed_ms + (time.monotonic() - job.answered_s) * 1000
        if not accepted:
            self._tracer.fail(self._span, "fenced", "the lease was lost, so the result was dropped")
        found = wire.unpack_reply(job.request_id, reply)
        if found.spent and (seen := of_reply(found, settled_ms + found.spent.kept_ms)):
            self._tracer.add_phases(self._span, self._parent, seen)
        self._span.end(round(settled_ms * 1e6))
