"""A row of traces: a request, and its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from leanq.campaigns.results import ANSWER, answer_columns
from leanq.campaigns.traces.tactics import steps_of
from leanq.queue.requests import LEAN_VERDICTS, Request, Tactic

Row = dict[str, Any]
"""A row by columns; a column that is left out is null."""

_QUESTION = (
    *("op", "text", "target", "target_theorems", "holes", "parent"),
    *("allow_axioms", "audit", "trust_programs"),
)
_TACTIC = ("op", "text", "goals_before", "goals_after", "verdict")
_OF_ANSWER = frozenset({*ANSWER, "state", "goals_after"})
_BUDGET = ("timeout_s", "memory_mb", "scratch_mb")
# What the row of a tactic has of its text's.
_OF_TEXT = (
    *("problem", "id", "sample", "tags", "labels", "environment", "verdict", "reason"),
    *("fingerprint", "worker", "ended"),
)


def trace(origin: Row, request: Request, answer: Mapping[str, Any]) -> Row:
    """Returns the row of a check, a verification or a step.

    Args:
        origin: where the request came from: its environment's name, and ``problem``, ``id``,
            ``sample``, ``tags``, ``labels`` and ``ended`` where they are known.
        answer: the reply's fields as in a record of results; fields left out are null.
    """
    row: Row = {
        "tags": [],
        **origin,
        "op": request.op,
        "text": request.tactic if request.op == "step" else request.code,
        "target": request.target or None,
        "target_theorems": list(request.theorems),
        "holes": list(request.holes),
        "parent": request.state or None,
        "allow_axioms": list(request.allow_axioms),
        "audit": request.audit,
        "trust_programs": request.trust_programs,
        **{name: getattr(request, name) for name in _BUDGET},
        **{name: value for name, value in answer.items() if name in _OF_ANSWER},
    }
    row["trace"] = _hash(row)
    return row


def of_tactics(row: Row, tactics: Sequence[Tactic]) -> Iterator[Row]:
    """Yields a row for each tactic of the text of a row, with the goals before and after it."""
    of_text = {name: value for name, value in row.items() if name in _OF_TEXT}
    is_proved = row["verdict"] == "accepted"
    for each in steps_of(row["text"], tactics, is_proved=is_proved):
        step: Row = {
            **of_text,
            "op": "tactic",
            "text": each.text,
            "goals_before": list(each.before),
            "goals_after": None if each.after is None else list(each.after),
        }
        said = [_environment(step), *(step[name] for name in _TACTIC)]
        yield step | {"trace": _digest(said)}


def schema(arrow: Any) -> Any:
    """Returns the columns of traces; ``arrow`` is the module ``pyarrow``."""
    text, number, flag = arrow.string(), arrow.int64(), arrow.bool_()
    texts = arrow.list_(text)
    columns = {
        **dict.fromkeys(("trace", "op", "problem", "id"), text),
        "sample": number,
        "tags": texts,
        **dict.fromkeys(("labels", "environment", "text", "target"), text),
        **dict.fromkeys(("target_theorems", "holes"), texts),
        "parent": text,
        "goals_before": texts,
        "state": text,
        **dict.fromkeys(("goals_after", "allow_axioms"), texts),
        **dict.fromkeys(("audit", "trust_programs"), flag),
        "timeout_s": arrow.float64(),
        **dict.fromkeys(("memory_mb", "scratch_mb"), number),
        **answer_columns(arrow),
        "ended": arrow.timestamp("ms", "UTC"),
    }
    return arrow.schema(columns)


def _hash(row: Row) -> str:
    """Returns a hash of question, environment, verdict and reason: 32 hexadecimal digits. Problem,
    run and machine do not matter."""
    said: list[Any] = [_environment(row), *(row[name] for name in _QUESTION)]
    said += (row["verdict"], row.get("reason"))
    if row["verdict"] not in LEAN_VERDICTS:
        # Lean's own verdicts are the same with any budget that allows them.
        said += (row[name] for name in _BUDGET)
    return _digest(said)


def _environment(row: Row) -> Any:
    # Without Lean's answer, only its name tells it.
    return row.get("fingerprint") or ["named", row["environment"]]


def _digest(said: list[Any]) -> str:
    return blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
