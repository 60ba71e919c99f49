"""Where the time of one request went, as far as the queue itself knows.

A record names the attempts that were lost, and a reply says what its worker measured. The
time-to-live of the reply tells when it was settled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from leanq.queue import wire
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.records import read_in_flight
from leanq.queue.requests import Reply
from leanq.queue.results import is_record

LOST = {
    "reaped": "its worker's lease expired",
    "overran": "it ran too long and was taken away",
    "requeue": "given back",
    "retry": "its worker failed at it",
    "defer": "left to a newer worker",
}
"""How attempts are lost, by the word in their record."""

_LOST = re.compile(r"([^ ;]*) (\d{1,15}) (\d{1,15}) (\w+);")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a request, with the parts of its time by name, in their order.

    ``worker`` is "" if none had it. ``end`` is for people, and "" while it lasts.
    """

    worker: str
    end: str
    phases_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of one request. The attempts' phases add up to its whole time.

    Attributes:
        submitted_s: when, in seconds since 1970 by the server's clock.
        end: how it ended; "" if it has not.
        attempts: the attempts, the oldest first. The oldest of very many are left out, and their
            time counts as waiting.
    """

    request_id: str
    submitted_s: float
    end: str
    attempts: tuple[Attempt, ...]

    @property
    def total_ms(self) -> float:
        """Returns the time from its submit to its settlement, or until now."""
        return sum(sum(attempt.phases_ms.values()) for attempt in self.attempts)

    def to_json(self) -> dict[str, Any]:
        """Returns it in values that JSON has."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for attempt in found["attempts"]:
            attempt["phases_ms"] = {k: round(ms, 3) for k, ms in attempt["phases_ms"].items()}
        return {**found, "total_ms": round(self.total_ms, 3)}


async def find(queue: OperatorQueue, request_id: str) -> Timeline | None:
    """Returns the timeline of a request in this shard; None if nothing is known of it.

    Raises:
        UnavailableError: the queue cannot be reached.
        WireError: its reply or its record cannot be read.
    """
    keys, ask = queue.shard.keys, queue.shard.ask
    key = keys.request(request_id)
    data, expires_ms, now = await ask(("GET", key), ("PEXPIRETIME", key), ("TIME",))
    if not data:
        return None
    if not is_record(data):
        reply = wire.unpack_reply(request_id, data)
        return of_reply(reply, expires_ms - reply.spent.kept_ms if reply.spent else None)
    try:
        flying, run_s = read_in_flight(request_id, data)
    except ValueError:
        return None
    kind, worker = await queue.phase(request_id)
    clock = _Clock(flying.submitted_s * 1000)
    attempts = [*clock.lost(flying.lost)]
    now_ms = int(now[0]) * 1000 + int(now[1]) / 1000
    phases = {}
    if kind == "l":
        (until_ms,) = await ask(("ZSCORE", keys.of("processing", worker), request_id))
        if until_ms is not None:
            phases["waited"] = clock.until(float(until_ms) - run_s * 1000)
        phases["runs"] = clock.until(now_ms)
    else:
        phases["shares a run" if kind == "j" else "waits"] = clock.until(now_ms)
    attempts.append(Attempt(worker, "", phases))
    return Timeline(request_id, flying.submitted_s, "", tuple(attempts))


def of_reply(reply: Reply, settled_ms: float | None) -> Timeline | None:
    """Returns the timeline of a request that has ended; None if its worker did not measure it.

    ``settled_ms``: when the reply was written, in milliseconds since 1970 by the server's clock.
    Without it the timeline ends with the run.
    """
    spent = reply.spent
    if spent is None or not reply.submitted_ms:
        return None
    clock, end = _Clock(reply.submitted_ms), reply.verdict or ("error" if reply.error else "echo")
    ran_to_ms = spent.claimed_ms + spent.held_us / 1000 + reply.wall_s * 1000
    if spent.claimed_ms and ran_to_ms <= reply.submitted_ms:
        # The run had ended before.
        attempt = Attempt(reply.worker, f"{end}, remembered", {"settled": 0.0})
        return Timeline(reply.request_id, reply.submitted_ms / 1000, end, (attempt,))
    if settled_ms is not None:
        clock.end_ms = settled_ms
    attempts = [*clock.lost(spent.lost)]
    phases = {}
    if spent.claimed_ms:
        at_ms: float = spent.claimed_ms
        phases["waited"] = clock.until(at_ms)
        phases["claimed"] = clock.until(at_ms := at_ms + spent.held_us / 1000)
        if spent.is_forked is not None:
            began = "forked" if spent.is_forked else "started"
            phases[began] = clock.until(at_ms := at_ms + spent.begun_us / 1000)
        judging_ms = ran_to_ms - reply.audit_s * 1000
        phases["elaborated"] = clock.until(judging_ms)
        if reply.audit_s:
            phases["judged"] = clock.until(ran_to_ms)
        if settled_ms is not None:
            phases["settled"] = clock.until(settled_ms)
    elif settled_ms is not None and reply.verdict != "poisoned":
        # Nobody notes when a request was claimed that is withdrawn from its worker.
        may_have_run = reply.verdict == "cancelled" and reply.attempts > 0
        phases["waited or ran" if may_have_run else "waited"] = clock.until(settled_ms)
    if phases:
        attempts.append(Attempt(reply.worker, end, phases))
    return Timeline(reply.request_id, reply.submitted_ms / 1000, end, tuple(attempts))


class _Clock:
    """Cuts the time since the submit into phases, up to ``end_ms``."""

    def __init__(self, submitted_ms: float) -> None:
        self.end_ms = float("inf")
        self._at_ms = submitted_ms

    def until(self, ms: float) -> float:
        """Returns the time since the last cut, and cuts here."""
        before_ms = self._at_ms
        # A request that joined a run has no part of what was before its own submit.
        self._at_ms = max(before_ms, min(ms, self.end_ms))
        return self._at_ms - before_ms

    def lost(self, text: str) -> Iterator[Attempt]:
        for worker, claimed_ms, lost_ms, why in _LOST.findall(text):
            phases = {}
            if int(claimed_ms):
                phases["waited"] = self.until(int(claimed_ms))
                phases["lost"] = self.until(int(lost_ms))
            else:
                phases["waited or ran"] = self.until(int(lost_ms))
            yield Attempt(worker, LOST.get(why, why), phases)
