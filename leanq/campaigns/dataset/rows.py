"""Data sets that are Python objects: rows with numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

from leanq.campaigns.dataset.row import FIRST_ROWS, BadRow, Fields, Row, read_row, require_fields
from leanq.campaigns.dataset.shapes import recognise

_BATCH_ROWS = 256
_ENDS_ROWS = 1000


class Table(Protocol):
    """The part of an Arrow table that is used."""

    @property
    def num_rows(self) -> int: ...

    def slice(self, offset: int, length: int) -> Any: ...


class RowsDataset:
    """Rows in memory, or in mapped Arrow files: a ``datasets.Dataset``, an Arrow table, or a
    sequence of mappings. Positions count rows.

    Args:
        rows: the rows.
        fields: what their fields mean; recognised by the first rows unless given.
        path: a name for messages.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]] | Table,
        fields: Fields | None = None,
        path: str = "rows",
    ) -> None:
        self.path = path
        self._rows = rows
        self._total = rows.num_rows if _is_table(rows) else len(rows)  # type: ignore[arg-type, union-attr]
        if fields is None:
            _, fields = recognise(islice(self._from(0), FIRST_ROWS)) or ("plain", Fields())
        self.fields = fields
        digest = blake2b(digest_size=8)
        for start in (0, max(0, self._total - _ENDS_ROWS)):
            for row in islice(self._from(start), _ENDS_ROWS):
                digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        self.fingerprint = f"rows:{self._total}:{digest.hexdigest()}"

    def total(self) -> int:
        return self._total

    def check_fields(self) -> None:
        require_fields(self.path, self.fields, islice(self._from(0), FIRST_ROWS))

    def rows(self, line: int = 1, start: int = 0) -> Iterator[Row | BadRow]:
        for record in self._from(start):
            start += 1
            yield read_row(self.fields, line, start, record)
            line += 1

    def _from(self, start: int) -> Iterator[Mapping[str, Any]]:
        rows: Any = self._rows
        for first in range(start, self._total, _BATCH_ROWS):
            if _is_table(rows):
                yield from rows.slice(first, _BATCH_ROWS).to_pylist()
            else:
                yield from (rows[n] for n in range(first, min(first + _BATCH_ROWS, self._total)))


def _is_table(rows: object) -> bool:
    # A `datasets.Dataset` has the number too, but no such method.
    return hasattr(rows, "num_rows") and hasattr(rows, "slice")
