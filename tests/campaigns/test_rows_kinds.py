"""Folders and Parquet files as data sets, and what is none."""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.campaigns.data_sets import ALL, TEXTS, put, read, resumes_everywhere, table

from leanq.campaigns.dataset import MAX_CODE_BYTES, BadRow, Fields, Row, open_dataset
from leanq.errors import UsageError, to_install

# A folder


def test_a_folder_is_sorted_by_whole_paths(tmp_path: Path) -> None:
    names = ["a.lean", "a/b.lean", "a-b.lean", "a/b/c.lean", "a/b-c.lean", "ab.lean", "Z/é.lean"]
    put(tmp_path, {name: name.encode() for name in names})
    put(tmp_path, {"notes.txt": b"", ".lake/x.lean": b"", ".hidden.lean": b"", "a/.lean": b""})
    (tmp_path / "folder.lean").mkdir()
    opened = open_dataset(str(tmp_path), Fields())
    rows = list(opened.rows())
    assert [row.id for row in rows] == sorted(names)
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert all(isinstance(row, Row) and row.codes == ((row.id,),) for row in rows)
    assert opened.total() == 7
    assert read(f"{tmp_path}/") == rows
    resumes_everywhere(opened)


def test_files_that_cannot_be_checked_are_bad_rows(tmp_path: Path) -> None:
    put(tmp_path, {"bytes.lean": b"ab\xff", "good.lean": "∀".encode()})
    too_many = MAX_CODE_BYTES + 1
    with (tmp_path / "large.lean").open("wb") as out:
        out.truncate(too_many)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "loop.lean").symlink_to(tmp_path / "loop.lean")
    (tmp_path / "gone.lean").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked.lean").symlink_to(tmp_path / "good.lean")
    os.mkfifo(tmp_path / "pipe.lean")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/name\xff.lean")).write_bytes(b"x")
    opened = open_dataset(str(tmp_path), Fields())
    found = {r.id: r.error if isinstance(r, BadRow) else r.codes for r in opened.rows()}
    assert found == {
        "bytes.lean": "no UTF-8 text: byte 3 is 0xff",
        "gone.lean": "No such file or directory",
        "good.lean": (("∀",),),
        "large.lean": f"the code has {too_many} bytes; at most {MAX_CODE_BYTES} are taken",
        "linked.lean": (("∀",),),
        "loop.lean": "Too many levels of symbolic links",
        "name\\xff.lean": (("x",),),
        "pipe.lean": "no regular file",
    }
    resumes_everywhere(opened)


def test_a_folder_with_other_names_or_sizes_is_another(tmp_path: Path) -> None:
    put(tmp_path, {"a.lean": b"1", "b.lean": b"2"})
    seen = [open_dataset(str(tmp_path), Fields()).fingerprint for _ in range(2)]
    assert seen[0] == seen[1]
    (tmp_path / "a.lean").write_bytes(b"12")
    seen.append(open_dataset(str(tmp_path), Fields()).fingerprint)
    (tmp_path / "b.lean").rename(tmp_path / "c.lean")
    seen.append(open_dataset(str(tmp_path), Fields()).fingerprint)
    assert len(set(seen)) == 3


# Parquet


@pytest.mark.slow
@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=20),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_parquet_comes_back_as_it_was_written(
    rows: list[tuple[str, str]], group: int, batch: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanq.campaigns.parquet._BATCH_ROWS", batch)
        names, codes = zip(*rows, strict=True)
        path = table(Path(folder, "data.PARQUET"), group, id=names, other=names, code=codes)
        opened = open_dataset(str(path), Fields())
        found = [(r.line, r.id, r.codes) for r in opened.rows() if isinstance(r, Row)]
        assert found == [(n, name, ((code,),)) for n, (name, code) in enumerate(rows, 1)]
        assert opened.total() == len(rows)
        resumes_everywhere(opened)


def test_parquet_of_other_types(tmp_path: Path) -> None:
    path = table(
        tmp_path / "data.parquet",
        name=pa.array([1, None, 3], pa.uint8()),
        task=pa.array(["t", "t", "u"]).dictionary_encode(),
        head=pa.array([None, "h", "h\n"], pa.large_string()),
        start=pa.array([None, None, None]),
        proof=pa.array([["a", "b"], ["c"], ["d", None]], pa.list_(pa.string())),
    )
    good, *bad = read(path, ALL)
    assert good == Row(1, 1, "t", (("a",), ("b",)), True)
    assert bad == [
        BadRow(2, None, "the field 'name' is null"),
        BadRow(3, 3, "the field 'proof' is a list whose element 1 is null"),
    ]


def test_parquet_bytes_are_no_text(tmp_path: Path) -> None:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"x\xff")]
    torn = pa.Array.from_buffers(pa.string(), 2, buffers)
    good, bad = read(table(tmp_path / "torn.parquet", id=[1, 2], code=torn))
    assert isinstance(good, Row)
    assert isinstance(bad, BadRow)
    expected = "the field 'code' is bytes, not text; it must be a text or a list of texts"
    assert bad.error == expected
    [bad] = read(table(tmp_path / "binary.parquet", id=[1], code=[b"x"]))
    assert isinstance(bad, BadRow)
    assert bad.error == expected


def test_one_column_may_serve_twice(tmp_path: Path) -> None:
    path = table(tmp_path / "data.parquet", id=["a"], code=["x"])
    [row] = read(path, Fields(problem="id"))
    assert isinstance(row, Row)
    assert (row.id, row.problem) == ("a", "a")


@pytest.mark.slow
def test_a_row_group_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    columns = pa.table({"id": range(600), "code": [secrets.token_hex(32_000) for _ in range(600)]})
    pq.write_table(columns, path, use_dictionary=False, write_batch_size=16)
    del columns
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in open_dataset(str(path), Fields()).rows()]
    assert len(held) == 600
    assert pq.read_metadata(path).num_row_groups == 1
    assert 0 < max(held) < 14 << 20 < path.stat().st_size


def test_without_pyarrow_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "data.parquet", id=[1], code=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UsageError, match="needs pyarrow, .*: " + re.escape(to_install("campaigns"))
    ):
        open_dataset(str(path), Fields())


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    path = table(tmp_path / "data.parquet", id=range(5000), code=[secrets.token_hex(50)] * 5000)
    data = bytearray(path.read_bytes())
    data[4:20_000] = bytes(19_996)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"data\.parquet: "):
        read(path)


# What is no data set


def _no_columns(folder: Path) -> Path:
    return table(folder / "data.parquet", id=[1], text=["x"])


def _no_parquet(folder: Path) -> Path:
    (folder / "data.parquet").write_bytes(b"PAR1 and nothing else")
    return folder / "data.parquet"


def _array(folder: Path) -> Path:
    (folder / "data.json").write_text('\n [{"id": 1, "code": "x"}]')
    return folder / "data.json"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "data.jsonl")
    return folder / "data.jsonl"


def _other(folder: Path) -> Path:
    (folder / "data.csv").write_text("id,code")
    return folder / "data.csv"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "gone.jsonl", "No such file or directory"),
        (lambda _: "-", "standard input"),
        (lambda _: "x\0", "null (byte|character)"),
        (lambda folder: folder, "there are no .lean files"),
        (_no_columns, "must have exactly one column 'code'; it has 'id', 'text'"),
        (_no_parquet, "data.parquet: "),
        (_array, "is a JSON array"),
        (_pipe, "neither a file nor a folder"),
        (_other, "is no data set"),
    ],
)
def test_what_is_no_data_set(tmp_path: Path, make: Callable[[Path], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        open_dataset(str(make(tmp_path)), Fields())
    assert "\n" not in str(raised.value)


def test_a_folders_files_have_no_fields(tmp_path: Path) -> None:
    put(tmp_path, {"a.lean": b""})
    with pytest.raises(UsageError, match="no fields"):
        open_dataset(str(tmp_path), Fields(problem="p"))


def test_data_may_go_while_it_is_read(tmp_path: Path) -> None:
    put(tmp_path / "folder", {"a.lean": b""})
    put(tmp_path, {"a.jsonl": b"{}"})
    table(tmp_path / "a.parquet", id=[1], code=["x"])
    for name in ("folder", "a.jsonl", "a.parquet"):
        opened = open_dataset(str(tmp_path / name), Fields())
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
        with pytest.raises(UsageError, match=f"{name}.*: No such file or directory"):
            list(opened.rows())
