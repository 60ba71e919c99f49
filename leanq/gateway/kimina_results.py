"""Turns replies into results for clients of Kimina Lean Server; docs/http.md shows the table.

These clients read ``error``, the severities of messages, and sorries. So every verdict but
``accepted`` shows in one of them, even if Lean printed nothing of the kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from leanq.errors import LeanQError
from leanq.queue.requests import LEAN_NO, LEAN_VERDICTS, Message, Reply, Sorry, Verdict

# Clients recognise a timeout by these words; no other error may contain them.
TIMED_OUT = "timed out"

LIBRARIES = frozenset(
    {
        *("Init", "Std", "Lean"),
        *("Mathlib", "Aesop", "Batteries", "ImportGraph", "LeanSearchClient", "Plausible"),
        *("ProofWidgets", "Qq"),
    }
)
"""Lean's own libraries, Mathlib, and what Mathlib brings. A server that lacks one of them cannot
judge the text; any other unknown import is the text's own error."""

_LACKING = re.compile(
    r"unknown (?:module prefix|package) '([^'.\n]*)[^'\n]*'"
    r"|object file '[^\n]*' of module (\w+) does not exist"
)
_SEVERITIES = {"information": "info"}
_ENDED: Mapping[Verdict | None, str] = {
    "cancelled": "the request was withdrawn",
    "expired": "the request was not begun by its deadline",
    "poisoned": "the request took down too many workers",
}


def result_of(end: Reply | LeanQError, timeout_s: int, *, debug: bool = False) -> dict[str, Any]:
    """Returns ``response`` or ``error`` of one text, ``time`` in seconds, and leanq's additions.

    ``debug``: the caller wants diagnostics; timeouts always have them.
    """
    if isinstance(end, LeanQError):
        return {"time": 0.0, "error": _without_timeout(str(end))}
    result: dict[str, Any] = {"time": round(end.wall_s, 4)}
    if end.verdict in LEAN_VERDICTS and not _lacks_a_library(end):
        result["response"] = _response(end)
    else:
        result["error"] = _error(end, timeout_s)
    if debug or end.verdict == "timeout":
        result["diagnostics"] = {"repl_uuid": end.worker}
    result["leanq"] = {
        "request_id": end.request_id,
        "verdict": end.verdict,
        "reason": end.reason,
        "axioms": None if end.axioms is None else list(end.axioms),
        "theorems": [{"name": t.name, "statement": t.statement} for t in end.theorems],
        "states": [sorry.state for sorry in end.sorries],
        "attempts": end.attempts,
        "queued_s": round(end.queued_s, 4),
        "cpu_s": round(end.cpu_s, 4),
    }
    return result


def _response(reply: Reply) -> dict[str, Any]:
    """Returns the answer of Kimina's REPL that agrees with the verdict."""
    messages = [_message(message) for message in reply.messages]
    sorries = [_sorry(number, sorry) for number, sorry in enumerate(reply.sorries)]
    if reply.verdict == "incomplete" and not sorries:
        sorries = [_sorry(0, _somewhere(reply))]
    elif reply.verdict in LEAN_NO - {"incomplete"} and not any(
        message["severity"] == "error" for message in messages
    ):
        text = f"leanq: {reply.verdict} ({reply.reason}): {_said(reply)}"
        messages.append(_message(Message("error", 1, 0, text)))
    response: dict[str, Any] = {"env": 0}
    if messages:
        response["messages"] = messages
    if sorries:
        response["sorries"] = sorries
    return response


def _error(reply: Reply, timeout_s: int) -> str:
    said = _said(reply)
    if _lacks_a_library(reply):
        said = f"this server does not have what the text imports: {said}"
    if reply.verdict == "timeout":
        return f"Lean REPL command {TIMED_OUT} in {timeout_s:.1f} seconds: {said}"
    return _without_timeout(f"leanq: {reply.verdict} ({reply.reason}): {said}")


def _lacks_a_library(reply: Reply) -> bool:
    """Returns whether the server, and not the text, is to blame for an unknown import."""
    if reply.reason != "unknown_import":
        return False
    found = (_LACKING.match(message.text) for message in reply.messages)
    return any((match[1] or match[2]) in LIBRARIES for match in found if match)


def _said(reply: Reply) -> str:
    """Returns leanq's last words on a reply."""
    ours = (m.text.removeprefix("leanq: ") for m in reversed(reply.messages) if m.is_ours)
    return next(ours, _ENDED.get(reply.verdict, "there is no further message"))


def _somewhere(reply: Reply) -> Sorry:
    """Returns a sorry that leanq cannot place: at Lean's warning, or at the text's beginning."""
    warnings = (m for m in reply.messages if m.severity == "warning" and not m.is_ours)
    at = next(warnings, Message("warning", 1, 0, ""))
    return Sorry(at.line, at.column, end_line=at.end_line, end_column=at.end_column)


def _message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {
        "severity": _SEVERITIES.get(message.severity, message.severity),
        "pos": {"line": message.line, "column": message.column},
    }
    if end := _end(message):
        made["endPos"] = end
    return {**made, "data": message.text}


def _sorry(number: int, sorry: Sorry) -> dict[str, Any]:
    pos = {"line": sorry.line, "column": sorry.column}
    # The client cannot read a sorry without an end or a goal.
    end = _end(sorry) or pos
    return {"pos": pos, "endPos": end, "goal": sorry.goal or "", "proofState": number}


def _end(of: Message | Sorry) -> dict[str, int] | None:
    if of.end_line is None or of.end_column is None:
        return None
    return {"line": of.end_line, "column": of.end_column}


def _without_timeout(text: str) -> str:
    # It may hold a candidate's last words.
    return text.replace(TIMED_OUT, "timed-out")
