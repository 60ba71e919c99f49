"""Records as a campaign writes them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

Record = dict[str, Any]


def done(id_: str | int | None, verdict: str | None, **fields: Any) -> Record:
    """The record of a text that was sent; its line is the number in its id."""
    line = fields.pop("line", int(id_[1:]) if isinstance(id_, str) else 1)
    cpu_s = fields.pop("cpu_s", 1.0)
    place = {name: fields.pop(name) for name in ("sample", "problem") if name in fields}
    text = f"{id_} {place.get('sample')}".encode()
    return {
        "id": id_,
        "line": line,
        **place,
        "verdict": verdict,
        "messages": [],
        "sorries": [],
        "axioms": None,
        "kernel": None,
        "attempts": 1,
        "worker": "w",
        "queued_s": 2 * cpu_s,
        "cpu_s": cpu_s,
        "wall_s": cpu_s + 0.5,
        "audit_s": 0.0,
        "fingerprint": "ab" * 32,
        "request_id": "r",
        "code_hash": blake2b(text, digest_size=8).hexdigest(),
        **fields,
    }


def bad(id_: str | int | None, line: int, error: str, **fields: Any) -> Record:
    """The record of a row that could not be checked."""
    return {"id": id_, "line": line, **fields, "verdict": None, "error": error}


def said(text: str) -> list[Record]:
    """Messages of which ``text`` is the first error."""
    return [
        {"severity": "warning", "line": 1, "column": 0, "text": "unused variable"},
        {"severity": "error", "line": 2, "column": 4, "text": text},
        {"severity": "error", "line": 3, "column": 0, "text": "not the first"},
    ]
