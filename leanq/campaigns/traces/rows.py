"""A row of traces: a request, and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from leanq.campaigns.results import ANSWER, answer_columns
from leanq.queue.requests import LEAN_VERDICTS, Request

Row = dict[str, Any]
"""A row by columns; a column that is left out is null."""

_QUESTION = (
    *("op", "text", "target", "target_theorems", "holes", "parent"),
    *("allow_axioms", "audit", "trust_programs"),
)
_OF_ANSWER = frozenset({*ANSWER, "state", "goals_after"})
_BUDGET = ("timeout_s", "memory_mb", "scratch_mb")


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
    # Without Lean's answer, only its name tells the environment.
    said: list[Any] = [row.get("fingerprint") or ["named", row["environment"]]]
    said += (row[name] for name in _QUESTION)
    said += (row["verdict"], row.get("reason"))
    if row["verdict"] not in LEAN_VERDICTS:
        # Lean's own verdicts are the same with any budget that allows them.
        said += (row[name] for name in _BUDGET)
    return blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
