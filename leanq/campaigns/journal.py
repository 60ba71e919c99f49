"""What a campaign has done so far, beside its results, for whoever comes next to go on from there.

Two files stand beside RESULTS until it is whole:

- ``RESULTS.part``: the records, one JSON line each, in the order in which they came;
- ``RESULTS.state``: SQLite. Which row's record begins where in the part, which line has which id,
  which problems are solved, and the cursor: the row before which everything is done.

A commit makes the part's new lines durable, then the index; the part is cut back to what the index
knows when it is opened. So a coordinator may die anywhere, and a record is there once or not at
all. The index is locked while it is open: of two coordinators of the same campaign one waits.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO, Literal

from leanq.campaigns.dataset.parquet import pyarrow
from leanq.campaigns.results import is_parquet, pack, read_results, write_results
from leanq.errors import UsageError
from leanq.queue.requests import LEAN_VERDICTS

Order = Literal["input", "finished"]

# Records that are in memory at a time while results are taken back.
_BATCH = 1000

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE done (line INTEGER, sample INTEGER, start INTEGER NOT NULL,
                   PRIMARY KEY (line, sample)) WITHOUT ROWID;
CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE solved (problem BLOB PRIMARY KEY) WITHOUT ROWID;
"""


class BusyError(UsageError):
    """Another coordinator has the journal open."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The row that begins at ``start``, as :class:`.rows.Row` says it, is the first not done."""

    line: int = 1
    start: int = 0


class Journal:
    """The journal of the campaign that writes ``out``.

    Args:
        out: the results' path.
        purpose: what the campaign is to do; a journal of another purpose is not continued, and
            gives way if it has no record.
        retry: whether records without a verdict of Lean's are checked anew, where ``out`` is whole.

    Raises:
        BusyError: another coordinator works on it.
        UsageError: ``out`` names no file or is there already, the journal is another campaign's or
            damaged, or the files cannot be written.
    """

    def __init__(self, out: str, purpose: dict[str, Any], *, retry: bool = False) -> None:
        folder, name = os.path.split(out)
        if not name:
            raise UsageError(f"{out!r} names no file for the results")
        if folder and not os.path.isdir(folder):
            raise UsageError(f"{out} cannot be written: there is no folder {folder}")
        if is_parquet(out):
            # What is missing is better known before hours of checks.
            pyarrow(out)
        self.out = out
        self.cursor = Cursor()
        self.counts = Counter[str]()
        self._part_path, self._state_path = out + ".part", out + ".state"
        self._lines: list[bytes] = []
        self._purpose = json.dumps(purpose, sort_keys=True)
        fresh = not os.path.exists(self._state_path)
        again = retry and fresh and os.path.exists(out)
        if os.path.exists(out) and fresh and not again:
            raise UsageError(f"{out} is there already; name another file, or remove it")
        try:
            self._db = sqlite3.connect(self._state_path, timeout=0)
            try:
                self._open(again)
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            if "database is locked" in str(error):
                raise BusyError(f"{out} is being written by another campaign") from None
            raise _explained(self._state_path, error) from None
        if self._meta("results") == "to be taken back":
            try:
                self._take_back()
            except UsageError:
                # Or else the next would begin with none of them, and replace them all.
                self._remove()
                self.close()
                raise

    @staticmethod
    def is_whole(out: str) -> bool:
        """Whether the campaign has ended and its results are there."""
        return os.path.exists(out) and not os.path.exists(out + ".state")

    @property
    def token(self) -> str:
        """What this campaign's request ids are made from, until its requests are withdrawn."""
        return self._meta("token")

    @property
    def barren(self) -> int:
        """How many coordinators in a row began and vanished without a record, with this one."""
        return int(self._meta("barren"))

    @property
    def rows(self) -> int:
        """How many rows there are before the cursor."""
        query = "SELECT count(DISTINCT line) FROM done WHERE line < ?"
        found: int = self._db.execute(query, (self.cursor.line,)).fetchone()[0]
        return found

    def give_up(self) -> None:
        """This coordinator ends before its campaign, and withdraws its requests. From the next
        commit on they are new ones, since what was withdrawn is answered with that.

        Raises:
            UsageError: the index cannot be written.
        """
        try:
            self._set(token=secrets.token_hex(16), barren="0")
        except sqlite3.Error as error:
            raise self.fault(error) from None

    def line_of(self, id_: str | int, line: int) -> int:
        """The first line that has this id, which is ``line`` if none had it before."""
        key = _key(id_)
        if self._db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, line)).rowcount:
            return line
        found: int = self._db.execute("SELECT line FROM ids WHERE id = ?", (key,)).fetchone()[0]
        return found

    def has(self, line: int, sample: int) -> bool:
        """Whether this sample's record is there."""
        if line > self._last:
            return False
        query = "SELECT 1 FROM done WHERE line = ? AND sample = ?"
        return self._db.execute(query, (line, sample)).fetchone() is not None

    def is_solved(self, problem: str | int) -> bool:
        """Whether some attempt at the problem was accepted."""
        query = "SELECT 1 FROM solved WHERE problem = ?"
        return self._db.execute(query, (_key(problem),)).fetchone() is not None

    def solve(self, problem: str | int) -> None:
        """Some attempt at the problem was accepted."""
        self._db.execute("INSERT OR IGNORE INTO solved VALUES (?)", (_key(problem),))

    def add(self, record: dict[str, Any]) -> None:
        """Adds the record of a sample that has none; it is durable after the next commit."""
        where = (record["line"], record.get("sample", 0), self._size_bytes)
        self._db.execute("INSERT INTO done VALUES (?, ?, ?)", where)
        line = pack(record)
        self._lines.append(line)
        self._size_bytes += len(line)
        self.counts[kind(record)] += 1

    def commit(self, cursor: Cursor) -> None:
        """Makes durable what was added, and that everything before ``cursor`` is done.

        Raises:
            UsageError: the files cannot be written, as on a full disk.
        """
        try:
            barren = "0" if self._lines else str(self.barren)
            if self._lines:
                self._part.write(b"".join(self._lines))
                self._part.flush()
                os.fsync(self._part.fileno())
                self._lines.clear()
            self.cursor = cursor
            self._set(
                size_bytes=str(self._size_bytes),
                cursor=f"{cursor.line} {cursor.start}",
                counts=json.dumps(self.counts),
                barren=barren,
            )
            self._db.commit()
        except (OSError, sqlite3.Error) as error:
            raise _explained(self._part_path, error) from None

    def finish(self, order: Order) -> None:
        """Makes the results whole, and removes what stood beside them. Everything is committed.

        Interrupted at any place, it can be done again by whoever opens the journal next.
        """
        try:
            if order == "finished" and not is_parquet(self.out):
                os.replace(self._part_path, self.out)
            else:
                write_results(self.out, self._records(order))
            self._remove()
            self.close()
        except (OSError, sqlite3.Error) as error:
            raise _explained(self.out, error) from None

    def fault(self, error: sqlite3.Error) -> UsageError:
        """What is wrong with the index, for people."""
        return _explained(self._state_path, error)

    def close(self) -> None:
        """Leaves the journal to whoever goes on; what was not committed is forgotten."""
        with suppress(sqlite3.Error):
            self._db.close()
        # On a full disk it still has what it could not write.
        with suppress(OSError):
            self._part.close()

    def _open(self, again: bool) -> None:
        # For as long as it is open, whatever else looks at the file.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("BEGIN EXCLUSIVE")
        if not os.path.exists(self._state_path):
            raise BusyError(f"{self.out} was written by another campaign just now")
        begun = bool(self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if begun and self._meta("purpose") != self._purpose:
            if self._meta("size_bytes") != "0" or os.path.exists(self.out):
                raise UsageError(
                    f"{self._state_path} is of a campaign with other data or other options; "
                    "go on with those, name other results, or remove that file"
                )
            # Nothing has come of that one, as where an option was wrong.
            for table in ("meta", "done", "ids", "solved"):
                self._db.execute(f"DROP TABLE {table}")
            begun = False
        if not begun:
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._set(
                purpose=self._purpose,
                token=secrets.token_hex(16),
                size_bytes="0",
                cursor="1 0",
                counts="{}",
                barren="0",
                results="to be taken back" if again else "",
            )
        self._set(barren=str(self.barren + 1))
        self._db.commit()
        self._size_bytes = int(self._meta("size_bytes"))
        line, start = map(int, self._meta("cursor").split())
        self.cursor = Cursor(line, start)
        self.counts.update(json.loads(self._meta("counts")))
        self._last = self._db.execute("SELECT coalesce(max(line), 0) FROM done").fetchone()[0]
        self._part = self._open_part()

    def _open_part(self) -> BinaryIO:
        size_bytes, path = self._size_bytes, self._part_path
        if not os.path.exists(path) and size_bytes and _size(self.out) == size_bytes:
            # It had its last name already.
            os.replace(self.out, path)
        if _size(path) < size_bytes:
            text = f"it ends before byte {size_bytes}, up to which it was written"
            raise UsageError(f"{path} is damaged: {text}; remove it and {self._state_path}")
        part = open(path, "ab")  # noqa: SIM115
        part.truncate(size_bytes)
        return part

    def _take_back(self) -> None:
        """Begins with those of the results that have a verdict of Lean's."""
        # Whoever began with it may have been killed.
        for table in ("done", "ids", "solved"):
            self._db.execute(f"DELETE FROM {table}")
        self._part.truncate(0)
        self._size_bytes = 0
        self.counts.clear()
        for record in read_results(self.out):
            if record["verdict"] in LEAN_VERDICTS:
                self.line_of(record["id"], record["line"])
                self.add(record)
                if record["verdict"] == "accepted":
                    self.solve(record.get("problem", record["id"]))
                if len(self._lines) > _BATCH:
                    self.commit(Cursor())
        self._set(results="")
        self.commit(Cursor())
        self._last = self._db.execute("SELECT coalesce(max(line), 0) FROM done").fetchone()[0]

    def _remove(self) -> None:
        # The index first, and under its lock: a part alone means nothing to anybody.
        os.remove(self._state_path)
        with suppress(FileNotFoundError):
            os.remove(self._part_path)

    def _records(self, order: Order) -> Iterator[dict[str, Any]]:
        by = "line, sample" if order == "input" else "start"
        with open(self._part_path, "rb") as part:
            for (start,) in self._db.execute(f"SELECT start FROM done ORDER BY {by}"):
                part.seek(start)
                yield json.loads(part.readline())

    def _meta(self, name: str) -> str:
        value: str = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[
            0
        ]
        return value

    def _set(self, **values: str) -> None:
        self._db.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())


def kind(record: dict[str, Any]) -> str:
    """As what a record is counted: its verdict, ``error``, or ``echoed``."""
    verdict: str | None = record["verdict"]
    return verdict or ("error" if "error" in record else "echoed")


def _key(name: str | int) -> bytes:
    # 1 and "1" are two names.
    return blake2b(json.dumps(name).encode(), digest_size=16).digest()


def _size(path: str) -> int:
    with suppress(FileNotFoundError):
        return os.path.getsize(path)
    return 0


def _explained(path: str, error: OSError | sqlite3.Error) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(f"{path} cannot be written: {reason}")
