"""A row of traces: a request, and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any

from leanq.campaigns.tables import answer_columns
from leanq.queue.requests import LEAN_VERDICTS, Request

Row = dict[str, Any]
"""A row by columns; a column that is left out is null."""

_QUESTION = (
    *("op", "text", "target", "target_theorems", "holes", "parent"),
    *("allow_axioms", "audit", "trust_programs"),
)
_BUDGET = ("timeout_s", "memory_mb", "scratch_mb")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from; its fields are columns.

    Attributes:
        environment: the name of the requested environment; ``None`` if it is not known.
        problem, id: the names of the problem and of the row in the data set.
        sample: the number of the row's text, from 0.
        tags: the row's.
        labels: the caller's labels, as JSON.
        ended: when the reply came, if that was noted.
    """

    environment: str | None
    problem: str | None = None
    id: str | None = None
    sample: int | None = None
    tags: tuple[str, ...] = ()
    labels: str | None = None
    ended: datetime | None = None


def trace(origin: Origin, request: Request, answer: Mapping[str, Any]) -> Row:
    """Returns the row of a check, a verification or a step.

    Args:
        answer: the reply's fields as in a record of results; fields left out are null.
    """
    step = request.op == "step"
    row: Row = {
        "trace": "",
        "op": request.op,
        "problem": origin.problem,
        "id": origin.id,
        "sample": origin.sample,
        "tags": list(origin.tags),
        "labels": origin.labels,
        "environment": origin.environment,
        "text": request.tactic if step else request.code,
        "target": request.target or None,
        "target_theorems": list(request.theorems),
        "holes": list(request.holes),
        "parent": request.state or None,
        "allow_axioms": list(request.allow_axioms),
        "audit": request.audit,
        "trust_programs": request.trust_programs,
        **{name: getattr(request, name) for name in _BUDGET},
    }
    row["ended"] = origin.ended
    row.update((name, value) for name, value in answer.items() if name in _OF_ANSWER)
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
        "labels": text,
        "environment": text,
        "text": text,
        "target": text,
        "target_theorems": texts,
        "holes": texts,
        "parent": text,
        "goals_before": texts,
        "state": text,
        "goals_after": texts,
        "allow_axioms": texts,
        "audit": flag,
        "trust_programs": flag,
        "timeout_s": arrow.float64(),
        "memory_mb": number,
        "scratch_mb": number,
        **answer_columns(arrow),
        "ended": arrow.timestamp("ms", "UTC"),
    }
    return arrow.schema(columns)


_OF_ANSWER = frozenset(
    {
        *("verdict", "reason", "messages", "sorries", "theorems", "failed", "axioms", "kernel"),
        *("attempts", "worker", "queued_s", "cpu_s", "wall_s", "audit_s", "fingerprint"),
        *("request_id", "state", "goals_after"),
    }
)


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
