"""Results of a campaign: a record for each row, or for each sample of a row.

A record is a JSON object. Its fields, in this order:

- ``id``: the row's id as in the data (text or whole number); null if it has none.
- ``line``: the row's place in the data, from 1.
- ``sample``: only if the row's code is a list of texts: the place in it, from 0.
- ``problem``: only if the data names one.
- ``tags``: only if the row has some.
- ``holes``: only if the target leaves definitions open: the names of those that the text fills in.
- ``verdict``: the reply's; null for an echo, and beside an ``error``.
- ``reason``, ``messages``, ``sorries``, ``theorems``: the reply's.
- ``failed``: only if the row has a target: the theorems of the target that are not proved.
- ``axioms``, ``kernel``, ``attempts``, ``worker``, ``queued_s``, ``cpu_s``, ``wall_s``,
  ``audit_s``, ``fingerprint``, ``request_id``: the reply's.
- ``tactics``: only if goals were asked for: the text's tactics, with the goals before each.
- ``code_hash``: of the text that was accepted, or else of the first one that the verdict rests on.
  It has 16 hexadecimal digits, equal for equal texts with equal targets.
- ``error``: why nothing was checked, as one line. Besides it the record has ``id``, ``line`` and
  ``verdict``, and where they are known ``sample``, ``problem``, ``tags`` and ``holes``.

A file of results is JSONL, or Parquet if its name ends with ``.parquet``. In Parquet every record
has all columns, with null for fields that it lacks. ``id`` and ``problem`` are then always texts,
since the first records do not tell the types of later ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from leanq.campaigns.dataset.row import BadRow, Row
from leanq.campaigns.files import replacing
from leanq.campaigns.parquet import ParquetFile, pyarrow, write_table
from leanq.errors import UsageError
from leanq.queue.requests import Reply, reply_to_json

ANSWER = (
    *("verdict", "reason", "messages", "sorries", "theorems", "failed", "axioms", "kernel"),
    *("attempts", "worker", "queued_s", "cpu_s", "wall_s", "audit_s", "fingerprint"),
    "request_id",
)
"""The fields of a reply that results and traces have."""

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ALWAYS = frozenset({"id", "line", "verdict"})
_ONLY_IF_KNOWN = frozenset({"sample", "problem", "tags", "holes", "failed", "tactics", "error"})


def of_reply(row: Row, sample: int, text: str, reply: Reply) -> dict[str, Any]:
    """Returns the record of the reply to a text of the row's code number ``sample`` (from 0)."""
    record = _head(row, sample) | reply_to_json(reply, ANSWER)
    if row.target is None:
        del record["failed"]
    if reply.tactics:
        record |= reply_to_json(reply, ("tactics",))
    record["code_hash"] = code_hash(row, text)
    return record


def of_error(row: Row | BadRow, sample: int | None, error: str) -> dict[str, Any]:
    """Returns the record of a row, or of its code number ``sample``, that could not be checked."""
    return {**_head(row, sample), "verdict": None, "error": error}


def cancelled(row: Row, sample: int) -> dict[str, Any]:
    """Returns the record of a code that was not sent, since another attempt had succeeded."""
    return of_reply(row, sample, row.codes[sample][0], Reply("cancelled", reason="withdrawn"))


def pack(record: dict[str, Any]) -> bytes:
    text = _dumps(record)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # UTF-8 has no bytes for half of a surrogate pair; JSON escapes it.
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def read_results(path: str) -> Iterator[dict[str, Any]]:
    """Yields the records in a file of results; raises UsageError, which names the line."""
    return _read_parquet(path) if is_parquet(path) else _read_jsonl(path)


def write_results(path: str, records: Iterable[dict[str, Any]]) -> None:
    """Replaces the file at ``path`` by one with ``records``; raises as ``replacing``."""
    # Before anything is written: pyarrow may be missing.
    schema = _schema(pyarrow(path)[0]) if is_parquet(path) else None
    with replacing(path) as stream:
        if schema is None:
            stream.writelines(map(pack, records))
        else:
            write_table(stream, map(_with_texts, records), schema)


def _head(row: Row | BadRow, sample: int | None) -> dict[str, Any]:
    record: dict[str, Any] = {"id": row.id, "line": row.line}
    if isinstance(row, Row):
        if row.listed and sample is not None:
            record["sample"] = sample
        if row.problem is not None:
            record["problem"] = row.problem
        if row.tags:
            record["tags"] = list(row.tags)
        if row.holes:
            record["holes"] = list(row.holes)
    return record


def code_hash(row: Row, text: str) -> str:
    whole = text if row.target is None else f"{row.target}\0{text}"
    return blake2b(whole.encode(), digest_size=8).hexdigest()


def is_parquet(path: str) -> bool:
    """Returns whether results at ``path`` are Parquet, by their name."""
    return path.lower().endswith(".parquet")


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


def _read_jsonl(path: str) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb") as stream:
            for line, text in enumerate(stream, 1):
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict) or not record.keys() >= _ALWAYS:
                    raise UsageError(f"{path}:{line}: expected a record of a campaign's results")
                yield record
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _read_parquet(path: str) -> Iterator[dict[str, Any]]:
    schema, file = _schema(pyarrow(path)[0]), ParquetFile(path)
    # Results of an older release have no tactics.
    names = [name for name in schema.names if name != "tactics" or name in file.columns]
    for row in file.records(names):
        # A record without a hash has an error. In a reply's record, other nulls are values.
        lacks = row.keys() - _ALWAYS if row["code_hash"] is None else _ONLY_IF_KNOWN
        yield {name: row[name] for name in row if row[name] is not None or name not in lacks}


def _with_texts(record: dict[str, Any]) -> dict[str, Any]:
    names = {name: record.get(name) for name in ("id", "problem")}
    return {**record, **{name: None if v is None else str(v) for name, v in names.items()}}


def _schema(arrow: Any) -> Any:
    text, number = arrow.string(), arrow.int64()
    tactic = {"line": number, "column": number, "goals": arrow.list_(text)}
    columns = {
        "id": text,
        "line": number,
        "sample": number,
        "problem": text,
        "tags": arrow.list_(text),
        "holes": arrow.list_(text),
        **answer_columns(arrow),
        "tactics": arrow.list_(arrow.struct(tactic)),
        **dict.fromkeys(("code_hash", "error"), text),
    }
    return arrow.schema(columns)
