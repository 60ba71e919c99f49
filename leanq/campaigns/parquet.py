"""Reads and writes Parquet files by rows; needs pyarrow (``leanq[campaigns]``)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO

from leanq.errors import UsageError, to_install

# Rows decoded at a time: fewer if they are large on average.
_BATCH_ROWS = 256
_BATCH_BYTES = 8 << 20
# Reads pages as they are needed, instead of whole row groups.
_BUFFER_BYTES = 1 << 18
# A row group is written once it has so many rows, or so much text in them.
_GROUP_ROWS = 8192
_GROUP_CHARS = 16 << 20


class ParquetFile:
    """A Parquet file, read by rows; raises UsageError, also without pyarrow."""

    def __init__(self, path: str) -> None:
        self.path = path
        arrow, self._parquet = pyarrow(path)
        self._errors: tuple[type[Exception], ...] = (arrow.ArrowException, OSError)
        with self._open() as file:
            self.columns: Sequence[str] = file.schema_arrow.names
            self.count: int = file.metadata.num_rows

    def records(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        """Yields the rows from number ``start`` (from 0) on, with these columns alone.

        Raises UsageError unless there is exactly one column of each name.
        """
        if absent := next((name for name in columns if self.columns.count(name) != 1), None):
            found = ", ".join(map(repr, self.columns))
            raise UsageError(
                f"{self.path} must have exactly one column {absent!r:.60}; it has {found:.500}"
            )
        return self._records(columns, start)

    def _records(self, columns: Sequence[str], start: int) -> Iterator[dict[str, Any]]:
        with self._open() as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if start >= group.num_rows:
                    start -= group.num_rows
                    continue
                batches = file.iter_batches(
                    batch_size=_batch_rows(group, columns),
                    row_groups=[number],
                    columns=columns,
                    # Lean takes far longer, and a process with threads does not fork safely.
                    use_threads=False,
                )
                read = partial(next, batches, None)
                while (batch := self._reading(read)) is not None:
                    values = [_values(batch.column(name)[start:]) for name in columns]
                    for row in zip(*values, strict=True):
                        yield dict(zip(columns, row, strict=True))
                    start = max(0, start - batch.num_rows)

    def _open(self) -> Any:
        return self._reading(
            lambda: self._parquet.ParquetFile(
                self.path, buffer_size=_BUFFER_BYTES, pre_buffer=False
            )
        )

    def _reading(self, read: Callable[[], Any]) -> Any:
        """Returns ``read()``; raises UsageError if the file is at fault."""
        try:
            return read()
        except self._errors as error:
            # pyarrow's own text for a system error is long and repeats the path.
            number = error.errno if isinstance(error, OSError) else None
            why = os.strerror(number) if number else " ".join(str(error).split())
            raise UsageError(f"{self.path}: {why:.200}") from None


def pyarrow(path: str) -> tuple[Any, Any]:
    """Returns the modules ``pyarrow`` and ``pyarrow.parquet``; raises UsageError if they are
    missing."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{path}: Parquet needs pyarrow, which is not installed: {to_install('campaigns')}"
        ) from None


def _batch_rows(group: Any, columns: Sequence[str]) -> int:
    chunks = (group.column(place) for place in range(group.num_columns))
    size_bytes: int = sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        # A list's elements are in a column below it.
        if chunk.path_in_schema.partition(".")[0] in columns or chunk.path_in_schema in columns
    )
    count: int = group.num_rows
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * count // max(1, size_bytes)))


def _values(column: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except ValueError:
        return [_value(cell) for cell in column]
    return values


def _value(cell: Any) -> Any:
    """Returns the cell as Python's value; empty bytes for a text that is not UTF-8."""
    try:
        return cell.as_py()
    except ValueError:
        return b""


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
        texts = (json.dumps(row, ensure_ascii=False).encode(errors="replace") for row in rows)
        return arrow.Table.from_pylist([*map(json.loads, texts)], schema=schema)


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
