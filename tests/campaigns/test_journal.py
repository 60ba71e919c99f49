"""Journals against a small model: what was committed is there once, wherever a process dies."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from leanq.campaigns import journal as module
from leanq.campaigns.journal import BusyError, Journal
from leanq.campaigns.results import read_results, write_results
from leanq.errors import UsageError

PURPOSE = {"data": "x"}
VERDICTS = ("accepted", "rejected", "timeout", None)
texts = st.text("aé\n∀", max_size=5)


def record(line: int, sample: int, verdict: str | None, text: str = "") -> dict[str, Any]:
    made = {"id": f"r{line}", "line": line, "sample": sample, "verdict": verdict, "text": text}
    return made if verdict else made | {"error": "bad"}


class JournalMachine(RuleBasedStateMachine):
    """``added`` are the records by place that a successor would not see yet, ``kept`` those that
    it would; ``seen`` are the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="leanq-t-"))
        self.out = str(self.folder / "out.jsonl")
        self.kept: dict[tuple[int, int], dict[str, Any]] = {}
        self.added: dict[tuple[int, int], dict[str, Any]] = {}
        self.solved: set[str] = set()
        self.solved_now: set[str] = set()
        self.problems: set[str] = set()
        self.problems_now: set[str] = set()
        self.cursor = self.cursor_now = 1
        self.fruitless_starts = 1
        self.kept_rows = 0
        self.journal = Journal(self.out, PURPOSE)

    @rule(
        line=st.integers(1, 6),
        sample=st.integers(0, 1),
        verdict=st.sampled_from(VERDICTS),
        text=texts,
    )
    def add(self, line: int, sample: int, verdict: str | None, text: str) -> None:
        if (line, sample) not in {**self.kept, **self.added}:
            made = self.added[line, sample] = record(line, sample, verdict, text)
            self.journal.add(made)

    @rule(line=st.integers(1, 6))
    def add_problem(self, line: int) -> None:
        self.journal.add_problem(f"r{line}")
        self.problems_now.add(f"r{line}")

    @rule(line=st.integers(1, 6))
    def solve(self, line: int) -> None:
        self.journal.solve(f"r{line}")
        self.solved_now.add(f"r{line}")
        self.problems_now.add(f"r{line}")

    @rule(line=st.integers(1, 9))
    def commit(self, line: int) -> None:
        self.fruitless_starts = 0 if self.added else self.fruitless_starts
        self.kept |= self.added
        self.solved |= self.solved_now
        self.problems |= self.problems_now
        self.added.clear()
        self.cursor = line
        self.journal.commit(self.cursor)

    @rule()
    def die_and_resume(self) -> None:
        """A process ends anywhere: what the system had of it at that moment is what is there."""
        there = {path: path.read_bytes() for path in self.folder.iterdir()}
        self.journal.close()
        for path, content in there.items():
            path.write_bytes(content)
        self.added.clear()
        self.solved_now, self.problems_now = set(self.solved), set(self.problems)
        self.journal = Journal(self.out, PURPOSE)
        self.fruitless_starts += 1
        assert self.journal.cursor == self.cursor
        assert self.journal.fruitless_starts == self.fruitless_starts
        for place in ((line, sample) for line in range(1, 7) for sample in range(2)):
            assert self.journal.has(*place) == (place in self.kept)

    @rule(retry=st.booleans())
    def finish(self, retry: bool) -> None:
        self.commit(9)
        self.journal.finish()
        found = list(read_results(self.out))
        places = sorted(self.kept)
        assert found == [self.kept[place] for place in places]
        assert os.listdir(self.folder) == ["out.jsonl"]
        assert Journal.is_whole(self.out)
        with pytest.raises(UsageError, match="exists"):
            Journal(self.out, PURPOSE)
        if retry:
            order_of = dict(zip(places, found, strict=True))
            self.kept = {
                p: r for p, r in order_of.items() if r["verdict"] in ("accepted", "rejected")
            }
            self.solved = {r["id"] for r in self.kept.values() if r["verdict"] == "accepted"}
        else:
            os.remove(self.out)
            self.kept, self.solved = {}, set()
        self.journal = Journal(self.out, PURPOSE, retry=retry)
        self.kept_rows = len({line for line, _ in self.kept})
        self.problems = set(self.solved)
        self.solved_now, self.problems_now = set(self.solved), set(self.solved)
        self.cursor = 1
        self.fruitless_starts = 0 if self.kept else 1

    @rule(line=st.integers(1, 6), other=st.integers(1, 6))
    def name(self, line: int, other: int) -> None:
        first = self.journal.line_of(f"n{line}", other)
        assert self.journal.line_of(f"n{line}", 99) == first

    @invariant()
    def counts_are_those_of_the_records(self) -> None:
        told = [r["verdict"] or "error" for r in {**self.kept, **self.added}.values()]
        counts = {name: count for name, count in self.journal.counts.items() if count}
        assert counts == {name: told.count(name) for name in told}
        rows = len({line for line, _ in {**self.kept, **self.added}})
        assert self.journal.found_rows == rows
        assert (self.journal.row_s is None) == (rows == self.kept_rows)
        assert self.journal.unsolved == len(self.problems_now - self.solved_now)
        for line in range(1, 7):
            assert self.journal.is_solved(f"r{line}") == (f"r{line}" in self.solved_now)

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("examples", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_journals_keep_what_was_committed(examples: int) -> None:
    run_state_machine_as_test(
        JournalMachine, settings=profile(profile.get_profile("leanq"), max_examples=examples)
    )


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out.jsonl")


@pytest.mark.parametrize("step", ["replace", "remove"])
def test_a_death_while_results_are_written_loses_nothing(
    out: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(out, PURPOSE)
    records = [record(2, 0, "rejected"), record(1, 0, "accepted", "∀")]
    for each in records:
        journal.add(each)
    journal.commit(3)
    done: list[object] = []

    def die(*arguments: object) -> None:
        done.append(arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.os, step, die)
        with pytest.raises(KeyboardInterrupt):
            journal.finish()
    assert done
    journal.close()
    successor = Journal(out, PURPOSE)
    assert successor.has(1, 0)
    assert successor.has(2, 0)
    successor.finish()
    assert list(read_results(out)) == records[::-1]
    assert os.listdir(Path(out).parent) == ["out.jsonl"]


def test_a_death_at_the_start_of_a_retry_loses_nothing(
    out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than SQLite holds in memory.
    records = [record(line, 0, "accepted", 999_999 * "x") for line in range(1, 5)]
    write_results(out, records)
    there: dict[Path, bytes] = {}

    def die(journal: Journal, cursor: int) -> None:
        there.update({path: path.read_bytes() for path in Path(out).parent.iterdir()})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            Journal(out, PURPOSE, retry=True)
    assert len(there[Path(out + ".part")]) > 999_999
    for path, content in there.items():
        path.write_bytes(content)
    # The results are still those of the campaign before.
    with pytest.raises(UsageError, match="exists"):
        Journal(out, PURPOSE)
    assert list(read_results(out)) == records
    for path, content in there.items():
        path.write_bytes(content)
    journal = Journal(out, PURPOSE, retry=True)
    assert all(journal.has(each["line"], 0) for each in records)
    assert journal.counts == {"accepted": 4}
    journal.finish()
    assert list(read_results(out)) == records


def test_results_that_cannot_be_retried_stay_as_they_are(out: str) -> None:
    Path(out).write_text("mine\n")
    for _ in range(2):
        with pytest.raises(UsageError, match="expected a record"):
            Journal(out, PURPOSE, retry=True)
        assert os.listdir(Path(out).parent) == ["out.jsonl"]
    assert Path(out).read_text() == "mine\n"


def test_two_coordinators_of_one_campaign(out: str) -> None:
    one = Journal(out, PURPOSE)
    with pytest.raises(BusyError, match="is being written"):
        Journal(out, PURPOSE)
    one.close()
    Journal(out, PURPOSE).close()


def test_a_journal_of_another_campaign(out: str) -> None:
    other = Journal(out, {"data": "y"})
    other.line_of("a", 1)
    other.commit(2)
    token = other.token
    other.close()
    # Nothing had come of it.
    journal = Journal(out, PURPOSE)
    assert (journal.cursor, journal.line_of("a", 7)) == (1, 7)
    assert journal.token != token
    journal.add(record(7, 0, "accepted"))
    journal.commit(8)
    journal.close()
    with pytest.raises(UsageError, match="other data or other options"):
        Journal(out, {"data": "y"})
    Journal(out, PURPOSE).close()


def test_files_that_are_no_journals(out: str) -> None:
    journal = Journal(out, PURPOSE)
    journal.add(record(1, 0, "accepted"))
    journal.commit(2)
    journal.close()
    text = "not a database, but long enough to be taken for one" * 99
    Path(out + ".part").write_text(text)
    with pytest.raises(UsageError, match=r"part is damaged, .*: file is not a database; remove it"):
        Journal(out, PURPOSE)
    assert Path(out + ".part").read_text() == text


def test_files_of_other_programs_and_cut_ones_are_no_journals(out: str) -> None:
    part = Path(out + ".part")
    with contextlib.closing(sqlite3.connect(part)) as other:
        other.execute("CREATE TABLE theirs (a)")
    theirs = part.read_bytes()
    with pytest.raises(UsageError, match=r"part is damaged, .*: no such table: meta; remove it"):
        Journal(out, PURPOSE)
    assert part.read_bytes() == theirs
    part.unlink()
    journal = Journal(out, PURPOSE)
    for line in range(1, 100):
        journal.add(record(line, 0, "accepted", 999 * "x"))
    journal.commit(100)
    journal.close()
    os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(UsageError, match=r"part is damaged, .*malformed; remove it"):
        Journal(out, PURPOSE)


def test_a_damaged_journal_is_named_where_results_are_written(out: str) -> None:
    journal = Journal(out, PURPOSE)
    for line in range(1, 1000):
        journal.add(record(line, 0, "accepted", 9999 * "x"))
    journal.commit(1000)
    with open(out + ".part", "r+b") as stream:
        stream.seek(os.path.getsize(out + ".part") // 10)
        stream.write(bytes(8 << 20))
    with pytest.raises(UsageError, match=r"part is damaged, .*malformed; remove it"):
        journal.finish()
    journal.close()
    assert not os.path.exists(out)


@pytest.mark.parametrize(
    "place",
    [
        '"line": 1, "sample": null',
        f'"line": {10**30}',
        '"line": null',
        '"line": "1"',
        '"line": NaN',
    ],
)
def test_records_without_a_place_are_not_retried(out: str, place: str) -> None:
    text = f'{{"id": "a", {place}, "verdict": "accepted"}}\n'
    Path(out).write_text(text)
    with pytest.raises(
        UsageError, match=r"a record of the id 'a' has the \w+ .*; expected a number"
    ):
        Journal(out, PURPOSE, retry=True)
    assert os.listdir(Path(out).parent) == ["out.jsonl"]
    assert Path(out).read_text() == text


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        Journal(str(tmp_path / "missing" / "out.jsonl"), PURPOSE)


def test_a_file_that_may_not_grow(out: str) -> None:
    journal = Journal(out, PURPOSE)
    journal.add(record(1, 0, "accepted"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"part cannot be written: disk I/O error"):
            journal.commit(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # The record is lost, so nothing behind it may be noted either.
    with pytest.raises(UsageError, match=r"part cannot be written: disk I/O error"):
        journal.commit(3)
    journal.close()
    successor = Journal(out, PURPOSE)
    assert not successor.has(1, 0)
    assert successor.cursor == 1
    successor.close()


def test_numbers_and_texts_are_two_kinds_of_ids(out: str) -> None:
    journal = Journal(out, PURPOSE)
    assert [journal.line_of(1, 1), journal.line_of("1", 2), journal.line_of(1, 3)] == [1, 2, 1]
    journal.close()


def test_what_a_row_took_is_remembered(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the time between two coordinators counts, nor what a retry keeps."""
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    journal = Journal(out, PURPOSE)
    journal.add(record(1, 0, "accepted"))
    now_s += 6.0
    journal.commit(2)
    journal.close()
    now_s += 1000.0
    journal = Journal(out, PURPOSE)
    assert (journal.found_rows, journal.row_s) == (1, 6.0)
    journal.add(record(2, 0, "timeout"))
    now_s += 4.0
    journal.commit(3)
    assert (journal.found_rows, journal.row_s) == (2, 5.0)
    journal.finish()
    journal = Journal(out, PURPOSE, retry=True)
    assert (journal.found_rows, journal.row_s) == (1, None)
    journal.add(record(2, 0, "accepted"))
    now_s += 3.0
    journal.commit(3)
    assert (journal.found_rows, journal.row_s) == (2, 3.0)
    journal.close()


@pytest.mark.parametrize("name", ["out.parquet", "OUT.PARQUET"])
def test_results_in_parquet_are_retried(tmp_path: Path, name: str) -> None:
    out = str(tmp_path / name)
    journal = Journal(out, PURPOSE)
    for line, verdict in ((1, "accepted"), (2, "timeout")):
        made = {"id": f"r{line}", "line": line, "verdict": verdict, "messages": [], "sorries": []}
        journal.add(made | {"code_hash": "0" * 16})
    journal.commit(3)
    journal.finish()
    again = Journal(out, PURPOSE, retry=True)
    assert (again.has(1, 0), again.has(2, 0)) == (True, False)
    again.finish()
    assert [json.loads(json.dumps(r))["id"] for r in read_results(out)] == ["r1"]
