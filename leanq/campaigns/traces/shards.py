"""A folder of tables, to which new traces are added.

Each shard is written under a hidden name and renamed once it is complete. The shards themselves
tell which traces are there. So a killed export continues with the first shard that it had not
completed.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Self

from leanq.campaigns.files import replacing
from leanq.campaigns.parquet import ParquetFile, pyarrow, write_table
from leanq.campaigns.traces.rows import Row, schema
from leanq.errors import UsageError

_SHARD = re.compile(r"traces-(\d{5,})\.parquet")
_LOCK = ".traces.lock"


class Shards:
    """The traces in ``folder``, which is made if it is missing; a context manager, for one process
    at a time. It takes about 100 bytes of memory for each trace in the folder.

    ``known`` counts rows that were left out as already there. Entering raises UsageError: pyarrow
    is missing, the folder cannot be written, or its files are no traces.
    """

    def __init__(self, folder: str, rows_per_shard: int) -> None:
        self._folder = Path(folder)
        self._rows_per_shard = rows_per_shard
        self._schema = schema(pyarrow(folder)[0])
        self._there: set[bytes] = set()
        self._next = 0
        self.written = self.shards = self.known = 0

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._folder / _LOCK, "ab")
            names = sorted(os.listdir(self._folder))
        except OSError as error:
            raise UsageError(f"{self._folder} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in names:
                if match := _SHARD.fullmatch(name):
                    self._next = max(self._next, int(match[1]) + 1)
                    self._there.update(map(bytes.fromhex, _hashes(self._folder / name)))
        except BaseException as error:
            self._lock.close()
            if isinstance(error, BlockingIOError):
                text = f"{self._folder} is being written by another export"
                raise UsageError(text) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Writes the rows that are not there yet; raises UsageError."""
        new = self._new(rows)
        for first in new:
            path = self._folder / f"traces-{self._next:05}.parquet"
            shard = chain([first], islice(new, self._rows_per_shard - 1))
            with replacing(str(path)) as stream:
                write_table(stream, shard, self._schema)
            self._next += 1
            self.shards += 1

    def _new(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            key = bytes.fromhex(row["trace"])
            if key in self._there:
                self.known += 1
                continue
            self._there.add(key)
            self.written += 1
            yield row


def _hashes(path: Path) -> Iterator[str]:
    try:
        yield from (row["trace"] for row in ParquetFile(str(path)).records(["trace"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no shard of traces: {error}") from None
