"""The journal of a campaign: what is done, and where a coordinator resumes.

It is SQLite, and stands beside RESULTS in ``RESULTS.part`` until the campaign has finished. It
holds the records, which line has which id, which problems are solved, and the cursor: the first row
that is not done.

A commit is a transaction. So wherever a coordinator dies, a record is there once or not at all. The
file stays locked while it is open, so two coordinators never run one campaign.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from leanq.campaigns.parquet import pyarrow
from leanq.campaigns.results import is_parquet, pack, read_results, write_results
from leanq.errors import UsageError
from leanq.queue.requests import LEAN_VERDICTS

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE done (line INTEGER NOT NULL, sample INTEGER NOT NULL, record BLOB NOT NULL,
                   PRIMARY KEY (line, sample));
CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE problems (problem BLOB PRIMARY KEY, solved INTEGER NOT NULL) WITHOUT ROWID;
"""


class BusyError(UsageError):
    """Another coordinator has the journal open."""


class Journal:
    """The journal of the campaign that writes ``out``.

    Args:
        out: the path of the results.
        purpose: identifies the campaign. A journal with another purpose is not resumed; without a
            record it is replaced.
        retry: if results exist, keep their records with a verdict of Lean's, and check the others
            again.

    Attributes:
        cursor: the line of the first row that is not done.
        counts: records by ``kind``.
        unsolved: problems that were added and are not solved.

    Raises:
        BusyError: another coordinator has it open.
        UsageError: ``out`` names no file or exists, the journal is another campaign's or damaged,
            or the files cannot be written. All methods may raise this.
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
        self.cursor = 1
        self.counts = Counter[str]()
        self.unsolved = 0
        self._path = out + ".part"
        self._has_added = False
        self._began_s = 0.0
        self._first_error: sqlite3.Error | None = None
        self._purpose = json.dumps(purpose, sort_keys=True)
        try:
            self._db = sqlite3.connect(self._path, timeout=0)
        except sqlite3.Error as error:
            raise _cannot_write(self._path, error) from None
        try:
            self._open(retry)
        except BaseException:
            self._db.close()
            raise

    @staticmethod
    def is_whole(out: str) -> bool:
        """Returns whether the campaign has finished and its results are complete."""
        return os.path.exists(out) and not os.path.exists(out + ".part")

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
        return int(self._one(query, self.cursor))

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
        ``cancelled``.
        """
        self._set(token=secrets.token_hex(16), fruitless_starts="0")

    def line_of(self, id_: str | int, line: int) -> int:
        """Returns the first line with this id; that is ``line`` if the id is new."""
        key = _key(id_)
        if self._execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", key, line).rowcount:
            return line
        return int(self._one("SELECT line FROM ids WHERE id = ?", key))

    def has(self, line: int, sample: int) -> bool:
        if line > self._last:
            return False
        query = "SELECT 1 FROM done WHERE line = ? AND sample = ?"
        return self._execute(query, line, sample).fetchone() is not None

    def is_solved(self, problem: str | int) -> bool:
        query = "SELECT 1 FROM problems WHERE problem = ? AND solved"
        return self._execute(query, _key(problem)).fetchone() is not None

    def add_problem(self, problem: str | int) -> None:
        """Counts a problem as unsolved, unless it is known."""
        statement = "INSERT OR IGNORE INTO problems VALUES (?, 0)"
        self.unsolved += self._execute(statement, _key(problem)).rowcount

    def solve(self, problem: str | int) -> None:
        self.add_problem(problem)
        statement = "UPDATE problems SET solved = 1 WHERE problem = ? AND NOT solved"
        self.unsolved -= self._execute(statement, _key(problem)).rowcount

    def add(self, record: dict[str, Any]) -> None:
        """Adds the record of a sample that has none; the next commit makes it durable."""
        where = record["line"], record.get("sample", 0)
        self._execute("INSERT INTO done VALUES (?, ?, ?)", *where, pack(record))
        self._has_added = True
        self.counts[kind(record)] += 1

    def commit(self, cursor: int) -> None:
        """Makes the added records durable, and notes that all before ``cursor`` is done and how
        long the coordinators have worked."""
        if self._has_added:
            self._set(fruitless_starts="0")
            self._has_added = False
        self.cursor = cursor
        now_s = time.monotonic()
        spent_s, self._began_s = float(self._meta("spent_s")) + now_s - self._began_s, now_s
        self._set(
            spent_s=str(spent_s),
            cursor=str(cursor),
            counts=json.dumps(self.counts),
        )
        self._execute("COMMIT")

    def finish(self) -> None:
        """Writes the results in the order of the data, and removes the journal.

        Call it once everything is committed. If it is interrupted, the next coordinator repeats it.
        """
        try:
            found = self._execute("SELECT record FROM done ORDER BY line, sample")
            write_results(self.out, (json.loads(record) for (record,) in found))
            os.remove(self._path)
            self.close()
        except OSError as error:
            raise _cannot_write(self.out, error) from None
        except sqlite3.Error as error:
            raise _cannot_write(self._path, error) from None

    def close(self) -> None:
        """Releases the journal's lock; what was not committed is lost."""
        with suppress(sqlite3.Error):
            self._db.close()

    def _open(self, retry: bool) -> None:
        # Keeps the lock until the file is closed.
        self._execute("PRAGMA locking_mode = EXCLUSIVE")
        self._execute("PRAGMA synchronous = FULL")
        self._execute("BEGIN EXCLUSIVE")
        if not os.path.exists(self._path):
            raise BusyError(f"{self.out} was just written by another campaign")
        named = self._execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = [name for (name,) in named]
        if tables and self._meta("purpose") != self._purpose:
            if self.found_rows or os.path.exists(self.out):
                raise UsageError(
                    f"{self._path} belongs to a campaign with other data or other options; "
                    "resume it with those, name another file for the results, or remove that file"
                )
            # That campaign has no record yet; an option may have been wrong.
            for table in tables:
                self._execute(f"DROP TABLE {table}")
            tables.clear()
        if not tables:
            try:
                self._begin(retry)
            except BaseException:
                os.remove(self._path)
                raise
        self.counts.update(json.loads(self._meta("counts")))
        self._last = self._one("SELECT coalesce(max(line), 0) FROM done")
        self.unsolved = self._one("SELECT count(*) FROM problems WHERE NOT solved")
        self._set(fruitless_starts=str(self.fruitless_starts + 1))
        self._began_s = time.monotonic()
        self.commit(int(self._meta("cursor")))

    def _begin(self, retry: bool) -> None:
        """Writes an empty journal; a retry's has those records of the results that have a verdict
        of Lean's."""
        is_there = os.path.exists(self.out)
        if is_there and not retry:
            raise UsageError(f"{self.out} exists; name another file for the results, or remove it")
        for statement in _SCHEMA.split(";"):
            self._execute(statement)
        for record in read_results(self.out) if is_there else ():
            if record["verdict"] in LEAN_VERDICTS:
                self._check_place(record)
                self.line_of(record["id"], record["line"])
                self.add(record)
                if record["verdict"] == "accepted":
                    self.solve(record.get("problem", record["id"]))
        self._set(
            purpose=self._purpose,
            token=secrets.token_hex(16),
            cursor="1",
            counts="{}",
            fruitless_starts="0",
            spent_s="0",
            kept_rows=str(self.found_rows),
        )

    def _check_place(self, record: dict[str, Any]) -> None:
        for name in ("line", "sample"):
            number = record.get(name, 0)
            if not isinstance(number, int | float) or not 0 <= number < 1 << 63:
                raise UsageError(
                    f"{self.out}: a record of the id {record['id']!r:.60} has the {name} "
                    f"{number!r:.60}; expected a number, as campaigns write it"
                )

    def _meta(self, name: str) -> str:
        return str(self._one("SELECT value FROM meta WHERE name = ?", name))

    def _one(self, query: str, *values: Any) -> Any:
        return self._execute(query, *values).fetchone()[0]

    def _set(self, **values: str) -> None:
        for each in values.items():
            self._execute("REPLACE INTO meta VALUES (?, ?)", *each)

    def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            # SQLite may have undone the transaction, and a later commit would have a gap.
            self.close()
            self._first_error = self._first_error or error
            if "database is locked" in str(error):
                raise BusyError(f"{self.out} is being written by another campaign") from None
            raise _cannot_write(self._path, self._first_error) from None


def kind(record: dict[str, Any]) -> str:
    """Returns what a record counts as: its verdict, ``error``, or ``echoed``."""
    verdict: str | None = record["verdict"]
    return verdict or ("error" if "error" in record else "echoed")


def _key(name: str | int) -> bytes:
    # 1 and "1" are different names.
    return blake2b(json.dumps(name).encode(), digest_size=16).digest()


def _cannot_write(path: str, error: OSError | sqlite3.Error) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    # Of SQLite's errors, only a damaged or foreign file has this class itself.
    if type(error) is sqlite3.DatabaseError or "no such table" in str(error):
        return UsageError(
            f"{path} is damaged, or no journal of this version of leanq: {reason}; remove it, and "
            "the campaign begins again"
        )
    return UsageError(f"{path} cannot be written: {reason}")
