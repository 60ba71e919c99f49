"""Data sets whose rows have numbers: Python objects, and Parquet files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any

from leanq.campaigns.dataset.jsonl import ends_hash
from leanq.campaigns.dataset.row import Dataset, Fields, Numbered
from leanq.campaigns.dataset.shapes import recognise
from leanq.campaigns.parquet import ParquetFile

_BATCH_ROWS = 256
_ENDS_ROWS = 1000


class RowsDataset(Dataset):
    """Rows in memory, or in mapped Arrow files.

    ``rows`` is a ``datasets.Dataset``, an Arrow table, or a sequence of mappings. Their first rows
    tell ``fields`` unless given; ``path`` is a name for messages.
    """

    def __init__(
        self,
        rows: Any,
        fields: Fields | None = None,
        path: str = "rows",
    ) -> None:
        self.path = path
        self._rows = rows
        # A `datasets.Dataset` has the number too, but no such method.
        self._is_table = hasattr(rows, "num_rows") and hasattr(rows, "slice")
        self._total: int = rows.num_rows if self._is_table else len(rows)
        if fields is None:
            _, fields = recognise(self.first_records()) or ("plain", Fields())
        self.fields = fields
        digest = blake2b(digest_size=8)
        for start in (0, max(0, self._total - _ENDS_ROWS)):
            for row in islice(self._from(start), _ENDS_ROWS):
                digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        self.fingerprint = f"rows:{self._total}:{digest.hexdigest()}"

    def total(self) -> int:
        return self._total

    def _records(self, line: int) -> Iterator[Numbered]:
        return enumerate(self._from(line - 1), line)

    def _from(self, start: int) -> Iterator[Mapping[str, Any]]:
        rows = self._rows
        for first in range(start, self._total, _BATCH_ROWS):
            if self._is_table:
                yield from rows.slice(first, _BATCH_ROWS).to_pylist()
            else:
                yield from (rows[n] for n in range(first, min(first + _BATCH_ROWS, self._total)))


class ParquetDataset(Dataset):
    """A data set in a Parquet file. Raises UsageError."""

    def __init__(self, path: str, fields: Fields) -> None:
        self.path, self.fields = path, fields
        self._file = ParquetFile(path)
        self._file.records(fields.columns)
        self.fingerprint = f"parquet:{os.path.getsize(path)}:{ends_hash(path)}"

    def total(self) -> int:
        return self._file.count

    def _records(self, line: int) -> Iterator[Numbered]:
        return enumerate(self._file.records(self.fields.columns, line - 1), line)
