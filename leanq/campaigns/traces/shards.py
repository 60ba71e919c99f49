"""A folder of tables to which new traces are added.

Each shard is written under a hidden name and renamed once it is complete, and which traces are
there is read from the shards themselves. An export that is killed therefore goes on with the first
shard that it had not completed.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Self

from leanq.campaigns.dataset.parquet import ParquetFile, pyarrow
from leanq.campaigns.files import replacing
from leanq.campaigns.tables import write_table
from leanq.campaigns.traces.rows import Row, schema
from leanq.errors import UsageError

_SHARD = re.compile(r"traces-(\d{5,})\.parquet")
_LOCK = ".traces.lock"


class Shards:
    """The traces in ``folder``, which is made; a context manager, for one process at a time.

    About 100 bytes of memory are used for each trace that is there.

    Attributes:
        written: how many rows, and ``shards`` how many shards were added.
        known: how many rows were left out, since they were there.

    Raises:
        UsageError: entering it: pyarrow is missing, the folder cannot be written, another process
            writes to it, or what is there are no traces.
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
            self._take_lock()
            for name in names:
                if match := _SHARD.fullmatch(name):
                    self._next = max(self._next, int(match[1]) + 1)
                    self._there.update(map(bytes.fromhex, _hashes(self._folder / name)))
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._lock.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Writes those rows that are not there yet.

        Raises:
            UsageError: they cannot be written. Shards that are complete stay.
        """
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

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self._folder} is being written by another export") from None


def _hashes(path: Path) -> Iterator[str]:
    """Those of the traces in a shard."""
    try:
        yield from (row["trace"] for row in ParquetFile(str(path)).records(["trace"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no shard of traces: {error}") from None
