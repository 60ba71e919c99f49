"""Results: what a record holds, and files of them that are there as a whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.campaigns import parquet
from leanq.campaigns.dataset import BadRow, Row
from leanq.campaigns.journal import Journal
from leanq.campaigns.results import cancelled, of_error, of_reply, pack, read_results, write_results
from leanq.errors import UsageError, to_install
from leanq.queue.requests import (
    CHECKED,
    Failure,
    Message,
    Reason,
    Reply,
    Severity,
    Sorry,
    Tactic,
    Theorem,
    Verdict,
    reply_to_json,
)

REPLY_FIELDS = [
    *("verdict", "reason", "messages", "sorries", "theorems", "failed", "axioms"),
    *("kernel", "attempts", "worker"),
    *("queued_s", "cpu_s", "wall_s", "audit_s", "fingerprint", "request_id", "code_hash"),
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
CHECK_FIELDS = [name for name in REPLY_FIELDS if name != "failed"]
COUNTS = st.integers(0, (1 << 32) - 1)
SECONDS = st.floats(0, 1e9)
REPLIES = st.builds(
    Reply,
    verdict=st.none() | st.sampled_from(get_args(Verdict)),
    reason=st.none() | st.sampled_from(get_args(Reason)),
    messages=st.lists(
        st.builds(
            Message,
            st.sampled_from(get_args(Severity)),
            COUNTS,
            COUNTS,
            TEXTS,
            st.none() | COUNTS,
            st.none() | COUNTS,
        ),
        max_size=3,
    ).map(tuple),
    sorries=st.lists(
        st.builds(
            Sorry,
            COUNTS,
            COUNTS,
            st.none() | TEXTS,
            st.none() | TEXTS,
            st.none() | COUNTS,
            st.none() | COUNTS,
        ),
        max_size=3,
    ).map(tuple),
    theorems=st.lists(st.builds(Theorem, TEXTS, TEXTS), max_size=2).map(tuple),
    failed=st.lists(st.builds(Failure, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple),
    axioms=st.none() | st.lists(TEXTS, max_size=3).map(tuple),
    tactics=st.lists(
        st.builds(Tactic, COUNTS, COUNTS, st.lists(TEXTS, max_size=2).map(tuple)), max_size=2
    ).map(tuple),
    fingerprint=st.none() | TEXTS,
    request_id=TEXTS,
    worker=TEXTS,
    attempts=COUNTS,
    queued_s=SECONDS,
    cpu_s=SECONDS,
    wall_s=SECONDS,
    audit_s=SECONDS,
)
ROWS = st.builds(
    Row,
    line=COUNTS.map(lambda n: n + 1),
    id=TEXTS | st.integers(),
    problem=st.none() | TEXTS | st.integers(),
    codes=st.lists(st.lists(TEXTS, min_size=1, max_size=3).map(tuple), min_size=1).map(tuple),
    listed=st.booleans(),
    target=st.none() | TEXTS,
    holes=st.lists(TEXTS, max_size=2).map(tuple),
)
BAD_ROWS = st.builds(BadRow, COUNTS, st.none() | TEXTS | st.integers(), TEXTS)


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    row = draw(ROWS)
    sample = draw(st.integers(0, len(row.codes) - 1))
    return draw(
        st.one_of(
            st.builds(
                of_reply,
                st.just(row),
                st.just(sample),
                st.sampled_from(row.codes[sample]),
                REPLIES,
            ),
            st.just(cancelled(row, sample)),
            st.builds(of_error, st.just(row), st.sampled_from([None, sample]), TEXTS),
            BAD_ROWS.map(lambda bad: of_error(bad, None, bad.error)),
        )
    )


def with_texts(record: dict[str, Any]) -> dict[str, Any]:
    """As Parquet has it: ids as texts."""
    return {
        name: str(value) if name in ("id", "problem") and value is not None else value
        for name, value in record.items()
    }


def some(count: int, text: str = "") -> Iterator[dict[str, Any]]:
    reply = Reply("rejected", messages=(Message("error", 1, 0, text),))
    for line in range(1, count + 1):
        yield of_reply(Row(line, f"r{line}", None, (("x",),), False), 0, "x", reply)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Records


def test_a_record_has_its_fields_in_order() -> None:
    reply = Reply("accepted", axioms=("propext",), worker="w", attempts=1)
    plain = of_reply(Row(3, "a", None, (("x",),), False), 0, "x", reply)
    assert list(plain) == ["id", "line", *CHECK_FIELDS]
    sampled = of_reply(Row(3, 7, "p", (("x",), ("y", "∀")), True), 1, "∀", reply)
    assert list(sampled) == ["id", "line", "sample", "problem", *CHECK_FIELDS]
    assert [sampled[name] for name in ("id", "line", "sample", "problem")] == [7, 3, 1, "p"]
    assert sampled["code_hash"] == blake2b("∀".encode(), digest_size=8).hexdigest()
    assert len(sampled["code_hash"]) == 16
    assert plain["axioms"] == ["propext"]


def test_a_record_of_a_row_with_a_target_says_what_failed() -> None:
    reply = Reply(
        "rejected",
        reason="statement_differs",
        failed=(Failure("t", "statement_differs", "expected p, got q"),),
        theorems=(Theorem("t", "q"),),
    )
    rows = [Row(1, "a", None, (("x",),), False, target) for target in (None, "", "t", "u")]
    plain, *verified = (of_reply(row, 0, "x", reply) for row in rows)
    assert "failed" not in plain
    for record in verified:
        assert list(record) == ["id", "line", *REPLY_FIELDS]
        expected = {"name": "t", "rule": "statement_differs", "text": "expected p, got q"}
        assert record["failed"] == [expected]
        assert record["theorems"] == [{"name": "t", "statement": "q"}]
        assert record["reason"] == "statement_differs"
    # The same code against another target is another text.
    assert len({record["code_hash"] for record in (plain, *verified)}) == 4


def test_a_record_of_an_error_has_what_is_known() -> None:
    row = Row(3, "a", 0, ("x", "y"), True)
    assert of_error(row, 1, "lost") == {
        "id": "a",
        "line": 3,
        "sample": 1,
        "problem": 0,
        "verdict": None,
        "error": "lost",
    }
    assert list(of_error(row, None, "lost")) == ["id", "line", "problem", "verdict", "error"]
    single = Row(3, "a", None, ("x",), False)
    assert list(of_error(single, 0, "lost")) == ["id", "line", "verdict", "error"]
    assert of_error(BadRow(4, None, "no JSON"), None, "no JSON") == {
        "id": None,
        "line": 4,
        "verdict": None,
        "error": "no JSON",
    }


def test_what_was_not_sent_is_cancelled() -> None:
    record = cancelled(Row(1, "a", None, ("x", "y"), True), 1)
    assert list(record) == ["id", "line", "sample", *CHECK_FIELDS]
    assert (record["verdict"], record["reason"]) == ("cancelled", "withdrawn")
    assert (record["messages"], record["attempts"], record["request_id"]) == ([], 0, "")


@given(REPLIES)
def test_submit_writes_the_same_fields_of_a_reply(reply: Reply) -> None:
    line = reply_to_json(reply, CHECKED)
    record = of_reply(Row(1, "a", None, (("x",),), False), 0, "x", reply)
    shared = [name for name in CHECK_FIELDS if name in line]
    assert {name: record[name] for name in shared} == {name: line[name] for name in shared}
    assert set(CHECK_FIELDS) - set(shared) == {"audit_s", "fingerprint", "code_hash"}


@pytest.mark.slow
@given(records())
def test_a_record_is_one_line(record: dict[str, Any]) -> None:
    line = pack(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert list(json.loads(line).items()) == list(record.items())


def test_texts_stay_readable_and_what_is_no_text_survives() -> None:
    assert pack({"id": "∀ 𝔸\u2028"}) == '{"id":"∀ 𝔸\u2028"}\n'.encode()
    for name in ("file\udcff", "∀\ud800"):
        assert json.loads(pack({"id": name}).decode()) == {"id": name}


# Files


@pytest.mark.slow
@given(st.lists(records(), max_size=8), st.sampled_from(["jsonl", "parquet"]), st.integers(1, 4))
def test_what_is_written_is_read(found: list[dict[str, Any]], ending: str, group: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_GROUP_ROWS", group)
        path = f"{folder}/results.{ending}"
        write_results(path, iter(found))
        expected = found if ending == "jsonl" else [with_texts(record) for record in found]
        back = list(read_results(path))
        assert [list(record.items()) for record in back] == [list(r.items()) for r in expected]
        assert os.listdir(folder) == [f"results.{ending}"]


def test_parquet_has_all_columns_whatever_the_records_have(tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    write_results(str(path), [of_error(BadRow(1, 5, "no JSON"), None, "no JSON")])
    table = pq.read_table(path)
    assert table.column_names[:6] == ["id", "line", "sample", "problem", "tags", "holes"]
    assert {*REPLY_FIELDS, "tactics", "error"} == set(table.column_names[6:])
    assert table.schema.field("id").type == pa.string()
    [row] = table.to_pylist()
    assert {name: value for name, value in row.items() if value is not None} == {
        "id": "5",
        "line": 1,
        "error": "no JSON",
    }
    # As an older release has written it.
    pq.write_table(table.drop_columns(["tactics"]), path)
    [record] = read_results(str(path))
    assert record == {"id": "5", "line": 1, "verdict": None, "error": "no JSON"}


def test_what_is_no_text_is_replaced_in_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "results.parquet")
    write_results(path, [{"id": "file\udcff", "line": 1, "verdict": None, "error": "∀\ud800"}])
    assert list(read_results(path)) == [{"id": "file?", "line": 1, "verdict": None, "error": "∀?"}]


def test_row_groups_are_bounded_by_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GROUP_CHARS", 100_000)
    path = str(tmp_path / "results.parquet")
    write_results(path, some(100, "x" * 10_000))
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [10] * 10


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_memory_is_flat(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 500)
    path = str(tmp_path / f"results.{ending}")
    tracemalloc.start()
    try:
        write_results(path, some(10_000, "x" * 100))
        assert sum(1 for _ in read_results(path)) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_was_there_stays_until_the_new_is_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"results.{ending}"
    path.write_text("old")

    def records() -> Iterator[dict[str, Any]]:
        for record in some(3):
            assert path.read_text() == "old"
            yield record
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_results(str(path), records())
    assert path.read_text() == "old"
    assert left_in(tmp_path) == [path.name]
    write_results(str(path), some(3))
    assert len(list(read_results(str(path)))) == 3
    assert left_in(tmp_path) == [path.name]


def test_new_results_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    path, other = tmp_path / "results.jsonl", tmp_path / "other"
    write_results(str(path), [])
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_link_leads_to_the_new_results(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "results.jsonl", tmp_path / "results.jsonl"
    target.write_text("old")
    link.symlink_to(target)
    write_results(str(link), some(1))
    assert link.is_symlink()
    assert len(target.read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone/results.jsonl", "cannot be written: No such file or directory"),
        ("folder", "is no regular file"),
        ("pipe.jsonl", "is no regular file"),
    ],
)
def test_where_results_cannot_be_put(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match=why):
        write_results(str(tmp_path / name), some(1))
    assert left_in(tmp_path) == ["folder", "pipe.jsonl"]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_full_disk_is_told(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"results.{ending}"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_results(str(path), some(1))
    assert path.read_text() == "old"
    assert left_in(tmp_path) == [path.name]


def test_what_a_killed_writer_left_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    (tmp_path / ".results.jsonl.part").write_text("much more than there will be" * 1000)
    write_results(str(path), some(1))
    assert [record["line"] for record in read_results(str(path))] == [1]
    assert left_in(tmp_path) == [path.name]


@pytest.mark.parametrize("text", ['{"id": 1, "li', "[1]", '{"id": 1}', "", "[" * 100_000, "\udcff"])
def test_damaged_results_are_told_with_their_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    good = b"".join(map(pack, some(2)))
    path.write_bytes(good + text.encode(errors="surrogateescape") + b"\n" + good)
    found = read_results(str(path))
    assert [next(found)["line"] for _ in range(2)] == [1, 2]
    with pytest.raises(UsageError, match=r"results\.jsonl:3: "):
        next(found)


def test_results_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        list(read_results(str(tmp_path / "gone.jsonl")))
    with pytest.raises(UsageError, match="No such file"):
        list(read_results(str(tmp_path / "gone.parquet")))
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(UsageError, match="must have exactly one column 'line'"):
        list(read_results(str(path)))


def test_without_pyarrow_a_campaign_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UsageError, match="needs pyarrow, .*: " + re.escape(to_install("campaigns"))
    ):
        Journal(str(tmp_path / "results.parquet"), {})
    assert left_in(tmp_path) == []


def test_without_pyarrow_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.parquet"
    path.write_text("old")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UsageError, match="needs pyarrow, .*: " + re.escape(to_install("campaigns"))
    ):
        write_results(str(path), some(1))
    with pytest.raises(UsageError, match="needs pyarrow"):
        list(read_results(str(path)))
    assert path.read_text() == "old"
    assert left_in(tmp_path) == [path.name]
