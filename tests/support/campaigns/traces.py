"""Traces in tests: read from their folder, and asked again from nothing but what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from leanq.local import Pool
from leanq.producer.future_client import LeanQFuture
from leanq.producer.request_builder import Check
from leanq.queue.requests import Reply


def read_traces(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
    return found


def asked_again(lean: Pool, row: dict[str, Any]) -> LeanQFuture[Reply]:
    """What a row says was asked. The parent of a step has to be known already."""
    options: Check = {
        "timeout_s": row["timeout_s"],
        "memory_mb": row["memory_mb"],
        "scratch_mb": row["scratch_mb"],
        "allow_axioms": row["allow_axioms"],
        "audit": row["audit"],
        "trust_programs": row["trust_programs"],
    }
    if row["op"] == "check":
        return lean.check(row["text"], **options)
    if row["op"] == "step":
        return lean.step(row["parent"], row["text"], **options)
    theorems, holes = row["target_theorems"], row["holes"]
    return lean.verify(row["target"], row["text"], theorems=theorems, holes=holes, **options)


def check_again(lean: Pool, rows: list[dict[str, Any]]) -> None:
    """Asks all rows again, in their order, which has to give their verdicts."""
    steps = [row for row in rows if row["op"] == "step"]
    others = [row for row in rows if row["op"] != "step"]
    # A step's state comes of a text, or of a step before it.
    asked = [(row, asked_again(lean, row)) for row in others]
    replies = [(row, future.result()) for row, future in asked]
    replies += ((row, asked_again(lean, row).result()) for row in steps)
    assert [wrong for row, reply in replies if (wrong := fault(row, reply))] == []


def fault(row: dict[str, Any], reply: Reply) -> str | None:
    """Where a reply says something else than the row; None where it says the same."""
    states = [each["state"] for each in row["sorries"] or ()]
    rules = [each["rule"] for each in row["failed"] or ()]
    kept = {**row, "sorries": states, "failed": rules, "goals_after": row["goals_after"] or []}
    said = {
        "verdict": reply.verdict,
        "reason": reply.reason,
        "sorries": [each.state for each in reply.sorries],
        "failed": [each.rule for each in reply.failed],
        "axioms": None if reply.axioms is None else list(reply.axioms),
        "fingerprint": reply.fingerprint,
        "state": reply.state,
        "goals_after": list(reply.goals),
    }
    others = [
        f"{name} was {kept[name]}, is {value}"
        for name, value in said.items()
        if kept[name] != value
    ]
    return f"{row['trace']} {row['text']!r}: {'; '.join(others)}" if others else None
