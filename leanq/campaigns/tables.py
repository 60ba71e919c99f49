"""Tables of checks as Parquet: the columns that results and traces share, and their writer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from leanq.campaigns.dataset.parquet import pyarrow

# A row group is written once it has so many rows, or so much text in them.
_GROUP_ROWS = 8192
_GROUP_CHARS = 16 << 20

ANSWER = (
    *("verdict", "reason", "messages", "sorries", "theorems", "failed", "axioms", "kernel"),
    *("attempts", "worker", "queued_s", "cpu_s", "wall_s", "audit_s", "fingerprint"),
    "request_id",
)
"""The fields of a reply that results and traces have."""

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def answer_columns(arrow: Any) -> dict[str, Any]:
    """Returns the types of a reply's columns by name; ``arrow`` is the module ``pyarrow``."""
    text, number, seconds = arrow.string(), arrow.int64(), arrow.float64()
    place = {"line": number, "column": number}
    end = {"end_line": number, "end_column": number}
    message = arrow.struct({"severity": text, **place, "text": text, **end})
    sorry = arrow.struct({**place, "goal": text, "state": text, **end})
    return {
        **dict.fromkeys(ANSWER, text),
        "messages": arrow.list_(message),
        "sorries": arrow.list_(sorry),
        "theorems": arrow.list_(arrow.struct({"name": text, "statement": text})),
        "failed": arrow.list_(arrow.struct({"name": text, "rule": text, "text": text})),
        "axioms": arrow.list_(text),
        "attempts": number,
        **dict.fromkeys(("queued_s", "cpu_s", "wall_s", "audit_s"), seconds),
    }


def write_table(stream: BinaryIO, rows: Iterable[Mapping[str, Any]], schema: Any) -> None:
    """Writes rows in compressed groups; a column that a row lacks is null.

    Memory is bounded by a group's rows and text.
    """
    arrow, parquet = pyarrow("the table")
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        for group in _groups(rows):
            writer.write_table(_table(arrow, group, schema))


def _table(arrow: Any, rows: list[Mapping[str, Any]], schema: Any) -> Any:
    try:
        return arrow.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        # A text with half of a surrogate pair has no bytes.
        whole = (dumps(row).encode(errors="replace") for row in rows)
        return arrow.Table.from_pylist([json.loads(text) for text in whole], schema=schema)


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    group: list[Mapping[str, Any]] = []
    chars = 0
    for row in rows:
        group.append(row)
        chars += _chars(row.values())
        if len(group) >= _GROUP_ROWS or chars >= _GROUP_CHARS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _chars(values: Iterable[Any]) -> int:
    chars = 0
    for value in values:
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, list | tuple):
            chars += _chars(value)
        elif isinstance(value, dict):
            chars += _chars(value.values())
    return chars
