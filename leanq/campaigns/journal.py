"""The journal of a campaign: what is done, and where a coordinator resumes.

Two files stand beside RESULTS until the campaign has finished:

- ``RESULTS.part``: the records, one JSON line each, in the order in which they were added;
- ``RESULTS.state``: SQLite. Holds where each record begins in the part, which line has which id,
  which problems are solved, and the cursor: the first row that is not done.

A commit makes the part's new lines durable, then the index. Opening the journal truncates the part
to what the index knows. So wherever a coordinator dies, a record is there once or not at all. The
index stays locked while it is open, so two coordinators never run one campaign.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from leanq.campaigns.dataset.parquet import pyarrow
from leanq.campaigns.results import is_parquet, pack, read_results, write_results
from leanq.errors import UsageError
from leanq.queue.requests import LEAN_VERDICTS

# Records in memory at a time while a retry reads the old results.
_RETRY_BATCH = 1000
_RETRY_PENDING = "pending"

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE done (line INTEGER, sample INTEGER, start INTEGER NOT NULL,
                   PRIMARY KEY (line, sample)) WITHOUT ROWID;
CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE problems (problem BLOB PRIMARY KEY, solved INTEGER NOT NULL) WITHOUT ROWID;
"""
_TABLES = ("meta", "done", "ids", "problems")


class BusyError(UsageError):
    """Another coordinator has the journal open."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The first row that is not done: its line, and where it begins (``next`` of the row before
    it)."""

    line: int = 1
    start: int = 0


class Journal:
    """The journal of the campaign that writes ``out``.

    Args:
        out: the path of the results.
        purpose: identifies the campaign. A journal with another purpose is not resumed; without a
            record it is replaced.
        retry: if results exist, keep their records with a verdict of Lean's, and check the others
            again.

    Attributes:
        cursor: the first row that is not done.
        counts: records by :func:`kind`.
        unsolved: problems that were added and are not solved.

    Raises:
        BusyError: another coordinator has it open.
        UsageError: ``out`` names no file or exists, the journal is another campaign's or damaged,
            or the files cannot be written.
    """

    def __init__(self, out: str, purpose: dict[str, Any], *, retry: bool = False) -> None:
        folder, name = os.path.split(out)
        if not name:
            raise UsageError(f"{out!r} names no file for the results")
        if folder and not os.path.isdir(folder):
            raise UsageError(f"{out} cannot be written: there is no folder {folder}")
        if is_parquet(out):
            # Fail now if pyarrow is missing, and not after hours of checks.
            pyarrow(out)
        self.out = out
        self.cursor = Cursor()
        self.counts = Counter[str]()
        self.unsolved = 0
        self._part_path, self._state_path = out + ".part", out + ".state"
        self._lines: list[bytes] = []
        self._began_s = time.monotonic()
        self._purpose = json.dumps(purpose, sort_keys=True)
        fresh = not os.path.exists(self._state_path)
        retries = retry and fresh and os.path.exists(out)
        if os.path.exists(out) and fresh and not retries:
            raise UsageError(f"{out} exists; name another file for the results, or remove it")
        try:
            self._db = sqlite3.connect(self._state_path, timeout=0)
            try:
                self._open(retries)
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            if "database is locked" in str(error):
                raise BusyError(f"{out} is being written by another campaign") from None
            raise _cannot_write(self._state_path, error) from None
        if self._meta("retry") == _RETRY_PENDING:
            try:
                self._keep_verdicts()
            except UsageError:
                # Otherwise the next coordinator would begin without them, and overwrite the
                # results.
                self._remove()
                self.close()
                raise

    @staticmethod
    def is_whole(out: str) -> bool:
        """Returns whether the campaign has finished and its results are complete."""
        return os.path.exists(out) and not os.path.exists(out + ".state")

    @property
    def token(self) -> str:
        """The secret that this campaign's request ids are derived from, until its requests are
        withdrawn."""
        return self._meta("token")

    @property
    def fruitless_starts(self) -> int:
        """How many coordinators in a row, this one included, have started and added no record;
        those that ended in order do not count."""
        return int(self._meta("fruitless_starts"))

    @property
    def rows(self) -> int:
        """How many rows stand before the cursor."""
        query = "SELECT count(DISTINCT line) FROM done WHERE line < ?"
        return int(self._one(query, self.cursor.line))

    @property
    def found_rows(self) -> int:
        return int(self._one("SELECT count(DISTINCT line) FROM done"))

    @property
    def row_s(self) -> float | None:
        """Seconds that a row took the coordinators so far; ``None`` before the first committed
        one. Rows that a retry has kept do not count."""
        checked = self.found_rows - int(self._meta("kept_rows"))
        return float(self._meta("spent_s")) / checked if checked else None

    def rotate_token(self) -> None:
        """Gives the campaign other request ids from the next commit on. A coordinator that
        withdraws its requests calls this, since the queue answers withdrawn ids with
        ``cancelled``. Raises UsageError.
        """
        try:
            self._set(token=secrets.token_hex(16), fruitless_starts="0")
        except sqlite3.Error as error:
            raise self.fault(error) from None

    def line_of(self, id_: str | int, line: int) -> int:
        """Returns the first line with this id; that is ``line`` if the id is new."""
        key = _key(id_)
        if self._db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, line)).rowcount:
            return line
        return int(self._one("SELECT line FROM ids WHERE id = ?", key))

    def has(self, line: int, sample: int) -> bool:
        if line > self._last:
            return False
        query = "SELECT 1 FROM done WHERE line = ? AND sample = ?"
        return self._db.execute(query, (line, sample)).fetchone() is not None

    def is_solved(self, problem: str | int) -> bool:
        query = "SELECT 1 FROM problems WHERE problem = ? AND solved"
        return self._db.execute(query, (_key(problem),)).fetchone() is not None

    def add_problem(self, problem: str | int) -> None:
        """Counts a problem as unsolved, unless it is known."""
        statement = "INSERT OR IGNORE INTO problems VALUES (?, 0)"
        self.unsolved += self._db.execute(statement, (_key(problem),)).rowcount

    def solve(self, problem: str | int) -> None:
        self.add_problem(problem)
        statement = "UPDATE problems SET solved = 1 WHERE problem = ? AND NOT solved"
        self.unsolved -= self._db.execute(statement, (_key(problem),)).rowcount

    def add(self, record: dict[str, Any]) -> None:
        """Adds the record of a sample that has none; the next commit makes it durable."""
        where = (record["line"], record.get("sample", 0), self._size_bytes)
        self._db.execute("INSERT INTO done VALUES (?, ?, ?)", where)
        line = pack(record)
        self._lines.append(line)
        self._size_bytes += len(line)
        self.counts[kind(record)] += 1

    def commit(self, cursor: Cursor) -> None:
        """Makes the added records durable, and notes that all before ``cursor`` is done and how
        long the coordinators have worked. Raises UsageError, as on a full disk."""
        try:
            if self._lines:
                self._part.write(b"".join(self._lines))
                self._part.flush()
                os.fsync(self._part.fileno())
                self._lines.clear()
                self._set(fruitless_starts="0")
            self.cursor = cursor
            now_s = time.monotonic()
            spent_s, self._began_s = float(self._meta("spent_s")) + now_s - self._began_s, now_s
            self._set(
                spent_s=str(spent_s),
                size_bytes=str(self._size_bytes),
                cursor=f"{cursor.line} {cursor.start}",
                counts=json.dumps(self.counts),
            )
            self._db.commit()
        except (OSError, sqlite3.Error) as error:
            raise _cannot_write(self._part_path, error) from None

    def finish(self) -> None:
        """Writes the results in the order of the data, and removes the journal; raises UsageError.

        Call it once everything is committed. If it is interrupted, the next coordinator repeats it.
        """
        try:
            write_results(self.out, self._records())
            self._remove()
            self.close()
        except (OSError, sqlite3.Error) as error:
            raise _cannot_write(self.out, error) from None

    def fault(self, error: sqlite3.Error) -> UsageError:
        """Returns the exception to raise for an error of the index."""
        return _cannot_write(self._state_path, error)

    def close(self) -> None:
        """Releases the journal's lock; what was not committed is lost."""
        with suppress(sqlite3.Error):
            self._db.close()
        # Closing writes once more, which a full disk refuses.
        with suppress(OSError):
            self._part.close()

    def _open(self, retries: bool) -> None:
        # Keeps the lock until the file is closed.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("BEGIN EXCLUSIVE")
        if not os.path.exists(self._state_path):
            raise BusyError(f"{self.out} was just written by another campaign")
        begun = bool(self._one("SELECT count(*) FROM sqlite_master"))
        if begun and self._meta("purpose") != self._purpose:
            if self._meta("size_bytes") != "0" or os.path.exists(self.out):
                raise UsageError(
                    f"{self._state_path} belongs to a campaign with other data or other options; "
                    "resume it with those, name another file for the results, or remove that file"
                )
            # That campaign has no record yet; an option may have been wrong.
            for table in _TABLES:
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
                fruitless_starts="0",
                spent_s="0",
                kept_rows="0",
                retry=_RETRY_PENDING if retries else "",
            )
        self._set(fruitless_starts=str(self.fruitless_starts + 1))
        self._db.commit()
        self._size_bytes = int(self._meta("size_bytes"))
        line, start = map(int, self._meta("cursor").split())
        self.cursor = Cursor(line, start)
        self.counts.update(json.loads(self._meta("counts")))
        self._last = self._one("SELECT coalesce(max(line), 0) FROM done")
        self.unsolved = self._one("SELECT count(*) FROM problems WHERE NOT solved")
        found_bytes = os.path.getsize(self._part_path) if os.path.exists(self._part_path) else 0
        if found_bytes < self._size_bytes:
            raise UsageError(
                f"{self._part_path} is damaged: it has {found_bytes} bytes where "
                f"{self._size_bytes} were written; remove it and {self._state_path}"
            )
        self._part = open(self._part_path, "ab")  # noqa: SIM115
        self._part.truncate(self._size_bytes)

    def _keep_verdicts(self) -> None:
        """Begins a retry with those records of the results that have a verdict of Lean's."""
        # A coordinator may have died in the middle of this.
        for table in _TABLES[1:]:
            self._db.execute(f"DELETE FROM {table}")
        self._part.truncate(0)
        self._size_bytes = self.unsolved = 0
        self.counts.clear()
        for record in read_results(self.out):
            if record["verdict"] in LEAN_VERDICTS:
                self.line_of(record["id"], record["line"])
                self.add(record)
                if record["verdict"] == "accepted":
                    self.solve(record.get("problem", record["id"]))
                if len(self._lines) > _RETRY_BATCH:
                    self.commit(Cursor())
        self.commit(Cursor())
        self._set(retry="", kept_rows=str(self.found_rows), spent_s="0")
        self._db.commit()
        self._last = self._one("SELECT coalesce(max(line), 0) FROM done")

    def _remove(self) -> None:
        # The index first, under its lock: the next journal overwrites a part without an index.
        os.remove(self._state_path)
        with suppress(FileNotFoundError):
            os.remove(self._part_path)

    def _records(self) -> Iterator[dict[str, Any]]:
        with open(self._part_path, "rb") as part:
            for (start,) in self._db.execute("SELECT start FROM done ORDER BY line, sample"):
                part.seek(start)
                yield json.loads(part.readline())

    def _meta(self, name: str) -> str:
        return str(self._one("SELECT value FROM meta WHERE name = ?", name))

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()[0]

    def _set(self, **values: str) -> None:
        self._db.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())


def kind(record: dict[str, Any]) -> str:
    """Returns what a record counts as: its verdict, ``error``, or ``echoed``."""
    verdict: str | None = record["verdict"]
    return verdict or ("error" if "error" in record else "echoed")


def _key(name: str | int) -> bytes:
    # 1 and "1" are different names.
    return blake2b(json.dumps(name).encode(), digest_size=16).digest()


def _cannot_write(path: str, error: OSError | sqlite3.Error) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(f"{path} cannot be written: {reason}")
