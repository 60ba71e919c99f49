"""One request: where it is, its text, and Lean's messages at their places."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from markupsafe import Markup
from msgspec import structs

from leanq.errors import LeanQError, UsageError, WireError
from leanq.fleet import timeline
from leanq.fleet.timeline import Timeline
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import Key
from leanq.gateway.page.texts import LONGEST_LINE, marked_line, weight
from leanq.gateway.page.viewers import Viewer
from leanq.gateway.v1_bodies import Check
from leanq.queue import wire
from leanq.queue.keys import shard_of
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.records import InFlight, read_in_flight, read_record
from leanq.queue.requests import Message, Reply, Request
from leanq.queue.results import is_record

Phase = Literal["waiting", "running", "quarantined", "ended", "dead"]

# Requests that used so much CPU time are offered a profile.
_SLOW_S = 1.0
_LINES_SHOWN = 2000
_MESSAGES_SHOWN = 200
_GOALS_SHOWN = 50
# The most weight of the text, and of all messages, goals, statements and failures each. The
# heaviest page renders in some tenths of a second.
_MOST_WEIGHT = 100_000
_LONGEST = 4000
_SEVERITIES = {"error": 0, "warning": 1, "information": 2}


@dataclass(slots=True)
class Found:
    """A request as the queue has it.

    ``owned``: it is of the viewer's own tenant, who can use its states. ``request`` is None, and
    ``environment`` "", once its text is no longer kept. ``unread`` says why it cannot be read.
    """

    request_id: str
    phase: Phase
    owned: bool
    request: Request | None = None
    in_flight: InFlight | None = None
    reply: Reply | None = None
    unread: str = ""
    timeline: Timeline | None = None
    environment: str = ""

    @property
    def ended(self) -> bool:
        return self.phase in ("ended", "dead")


async def find(lean: GatewayClient, viewer: Viewer, request_id: str) -> Found | None:
    """Returns a request; None if the viewer may see none. Raises UnavailableError."""
    with contextlib.suppress(UsageError):
        shard = shard_of(request_id)
        for queue in lean.queues:
            if queue.shard.keys.shard == shard and (
                found := await _find(queue, lean, viewer, request_id)
            ):
                with contextlib.suppress(WireError):
                    found.timeline = await timeline.find(queue, request_id)
                return found
    return None


async def _find(
    queue: OperatorQueue, lean: GatewayClient, viewer: Viewer, request_id: str
) -> Found | None:
    letter = None
    with contextlib.suppress(WireError):
        letter = await queue.dead_letter(request_id)
    if letter and viewer.owns(letter.submission.tenant, letter.submission.environment):
        request, unread = _unpacked(letter.submission.body)
        asked = letter.submission
        where = asked.environment, asked.tenant, asked.priority
        dead = InFlight(request_id, *where, letter.attempts, letter.died_s, letter.worker)
        return Found(request_id, "dead", asked.tenant == viewer.tenant, request, dead, None, unread)
    data = await _get(queue, queue.shard.keys.request(request_id))
    if data is None:
        return None
    if is_record(data):
        return await _in_flight(queue, viewer, request_id, data)
    return _ended(lean, viewer, request_id, data)


async def _get(queue: OperatorQueue, key: str) -> bytes | None:
    return cast("bytes | None", await queue.shard.call(lambda c: cast("Any", c.get(key))))


async def _in_flight(
    queue: OperatorQueue, viewer: Viewer, request_id: str, data: bytes
) -> Found | None:
    try:
        flying, _ = read_in_flight(request_id, data)
        submission, _ = read_record(request_id, data)
    except (ValueError, WireError):
        return None
    if not viewer.owns(flying.tenant, flying.environment):
        return None
    kind, worker = await queue.phase(request_id)
    phases: dict[str, Phase] = {"l": "running", "j": "running", "i": "quarantined"}
    # A detached request may have ended by now, and its body with it.
    body = submission.body or await _get(queue, queue.shard.keys.of("body", request_id))
    request, unread = _unpacked(body) if body else (None, "")
    if worker:
        running = await queue.running([worker], _LINES_SHOWN)
        flying = next((each for each in running if each.request_id == request_id), flying)
    owned = flying.tenant == viewer.tenant
    phase = phases.get(kind, "waiting")
    return Found(request_id, phase, owned, request, flying, None, unread)


def _ended(lean: GatewayClient, viewer: Viewer, request_id: str, data: bytes) -> Found | None:
    # A reply does not name its tenant, but the ids of gateways do.
    owned = viewer.name_of(request_id) is not None
    if not owned and not viewer.operates:
        return None
    kept = lean.recent.find(request_id)
    if kept and not viewer.operates and not viewer.sees_environment(kept.submission.environment):
        return None
    request = _unpacked(kept.submission.body)[0] if kept else None
    try:
        reply, unread = wire.unpack_reply(request_id, data), ""
    except WireError as error:
        reply, unread = None, f"the reply cannot be read: {error}"
    environment = kept.submission.environment if kept else ""
    return Found(request_id, "ended", owned, request, None, reply, unread, None, environment)


def sealed(found: Found, access: Access, key: Key) -> Found:
    """Returns the request with states that only the key's tenant can use.

    States of other tenants are left out.
    """
    if found.reply and found.owned:
        found.reply = access.sealed(key, found.reply)
    elif found.reply:
        sorries = tuple(structs.replace(sorry, state=None) for sorry in found.reply.sorries)
        found.reply = structs.replace(found.reply, sorries=sorries, state=None)
    return found


def _unpacked(body: bytes) -> tuple[Request | None, str]:
    try:
        return wire.unpack_request(body), ""
    except LeanQError as error:
        return None, f"the request cannot be read: {error}"


def text_of(request: Request) -> str:
    """Returns the Lean text of a request; of a step its tactic."""
    return request.tactic if request.op == "step" else request.code


def profile_of(found: Found) -> Any:
    """Returns the check that says where Lean spends its time in a request's text; None if there is
    no text to read again."""
    asked = found.request
    if asked is None or asked.op not in ("check", "verify") or asked.profile:
        return None
    how = {name: getattr(asked, name) for name in ("timeout_s", "memory_mb", "scratch_mb")}
    environment = found.environment or None
    return Check(code=asked.code, environment=environment, profile=True, **how)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a text: its number, its marked text, and its messages."""

    number: int
    text: Markup
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Listing:
    """A text with messages at their places: ``elsewhere`` those at none of the lines shown, and
    how many lines and messages were cut."""

    lines: Sequence[Line]
    elsewhere: Sequence[Message]
    cut_lines: int
    cut_messages: int


def listing(code: str, reply: Reply | None) -> Listing:
    """Returns the first lines of a text, with the gravest messages."""
    lines = code.split("\n")
    kept = _kept(lines)
    everything = list(reply.messages) if reply else []
    # Keep errors first, then the earliest messages.
    ranked = sorted(everything, key=lambda message: _SEVERITIES.get(message.severity, 3))
    shown = sorted(ranked[:_MESSAGES_SHOWN], key=lambda message: (message.line, message.column))
    at: defaultdict[int, list[Message]] = defaultdict(list)
    elsewhere: list[Message] = []
    for message in shown:
        inside = 1 <= message.line <= len(kept)
        (at[message.line] if inside else elsewhere).append(message)
    made = [
        Line(number, marked_line(line, _spans(number, at[number])), at[number])
        for number, line in enumerate(kept, 1)
    ]
    cut = len(lines) - len(kept), len(everything) - len(shown)
    return Listing(made, elsewhere, *cut)


def _kept(lines: Sequence[str]) -> Sequence[str]:
    """Returns the first lines, as many as a page has room for."""
    left = _MOST_WEIGHT
    for number, line in enumerate(lines[:_LINES_SHOWN]):
        left -= weight(line[:LONGEST_LINE])
        if left < 0:
            return lines[:number]
    return lines[:_LINES_SHOWN]


def _longest(number: int) -> int:
    """Returns how much each of so many texts may weigh."""
    return min(_LONGEST, _MOST_WEIGHT // max(1, number))


def _spans(line: int, messages: Sequence[Message]) -> list[tuple[int, int | None, str]]:
    ranked = sorted(messages, key=lambda message: _SEVERITIES.get(message.severity, 3))
    # If a message's end is unknown, the page shows its place as text instead.
    return [
        (message.column, message.end_column if message.end_line == line else None, message.severity)
        for message in ranked
        if message.end_line is not None
    ]


def context_of(found: Found) -> dict[str, Any]:
    reply, request = found.reply, found.request
    code = text_of(request) if request else ""
    told = reply or Reply()
    sorries, goals = told.sorries[:_GOALS_SHOWN], told.goals[:_GOALS_SHOWN]
    listed = listing(code, reply)
    messages = sum(len(line.messages) for line in listed.lines) + len(listed.elsewhere)
    return {
        "found": found,
        "request": request,
        "reply": reply,
        "flying": found.in_flight,
        "listing": listed,
        "has_text": bool(code),
        "is_slow": told.cpu_s >= _SLOW_S and profile_of(found) is not None,
        "profile": told.profile,
        "longest_message": _longest(messages),
        "longest_goal": _longest(len(sorries) + len(goals)),
        "longest_failure": _longest(len(told.failed[:_GOALS_SHOWN])),
        "sorries": sorries,
        "goals": goals,
        "cut_goals": len(told.sorries) + len(told.goals) - len(sorries) - len(goals),
    }
