"""Data sets of Lean texts, read row by row from any row on.

A data set is a JSONL file, a folder of ``.lean`` files, or a Parquet file. A row that cannot be
checked becomes a ``BadRow``, and the others are read all the same. Readers remember no row, so
callers look for repeated ids.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from leanq.campaigns.dataset.folder import FolderDataset
from leanq.campaigns.dataset.jsonl import JsonlDataset
from leanq.campaigns.dataset.row import (
    FIRST_ROWS,
    MAX_CODE_BYTES,
    BadRow,
    Dataset,
    Fields,
    Row,
)
from leanq.campaigns.dataset.rows import ParquetDataset, RowsDataset
from leanq.campaigns.dataset.shapes import SHAPES, recognise
from leanq.campaigns.parquet import ParquetFile
from leanq.errors import UsageError

__all__ = [
    "MAX_CODE_BYTES",
    "SHAPES",
    "BadRow",
    "Dataset",
    "Fields",
    "Row",
    "RowsDataset",
    "fields_of",
    "open_dataset",
]

_JSONL = (".jsonl", ".ndjson", ".json")


def open_dataset(path: str, fields: Fields) -> Dataset:
    """Opens the data set at ``path``: a folder, or a file whose suffix names its kind.

    Raises UsageError: no such data set, or it cannot be read; a Parquet file lacks a named column,
    or pyarrow is missing; a folder has no ``.lean`` files.
    """
    if path == "-":
        raise UsageError("a data set cannot be read from standard input, as it may be read again")
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise UsageError(f"{path!r}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        return FolderDataset(path, fields)
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is neither a file nor a folder, and could be read only once")
    if path.lower().endswith(".parquet"):
        return ParquetDataset(path, fields)
    if path.lower().endswith(_JSONL):
        return JsonlDataset(path, fields)
    raise UsageError(
        f"{path} is no data set; expected a folder of .lean files, or a file whose name ends in "
        f"{', '.join(_JSONL)} or .parquet"
    )


def fields_of(
    path: str, given: Mapping[str, str], shape: str = "auto", *, target: bool = True
) -> tuple[str, Fields]:
    """Returns the name of the data's shape, and what its fields mean.

    Args:
        given: fields that the caller names; they replace those of the shape.
        shape: one of ``SHAPES``; ``plain`` for none; ``auto`` recognises it by the first rows,
            unless a field was given.
        target: whether codes are verified against their rows' statements.

    Raises:
        UsageError: the data cannot be read, or is not of the shape.
    """
    name, found = "plain", Fields()
    rows = [] if shape == "plain" or (shape == "auto" and given) else _first_records(path)
    if shape == "auto":
        name, found = recognise(rows) or (name, found)
    elif shape != "plain":
        fields = SHAPES[shape].fields(rows)
        if fields is None:
            named = ", ".join(map(repr, SHAPES[shape].statements))
            columns = ", ".join(sorted({repr(key)[:60] for row in rows for key in row})[:20])
            raise UsageError(
                f"{path} is not of the shape {shape}, which has an id and a statement ({named}); "
                f"its rows have {columns or 'no field at all'}"
            )
        name, found = shape, fields
    changes: dict[str, Any] = {**given, "verified": target}
    return name, replace(found, **changes)


def _first_records(path: str) -> list[Mapping[str, Any]]:
    if path.lower().endswith(".parquet"):
        file = ParquetFile(path)
        return list(islice(file.records(list(dict.fromkeys(file.columns))), FIRST_ROWS))
    if not path.lower().endswith(_JSONL) or not os.path.isfile(path):
        return []
    return list(JsonlDataset(path, Fields()).first_records())
