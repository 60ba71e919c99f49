"""Data sets: every row as it stands there, from any row on, whatever else stands there."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.campaigns import fields as fields_module
from leanq.campaigns import jsonl
from leanq.campaigns.rows import MAX_CODE_BYTES, BadRow, Data, Fields, Row, open_data
from leanq.config import MAX_REQUEST_BYTES
from leanq.errors import UsageError
from leanq.wire import Request, pack_request

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.one_of(TEXTS, st.integers())
CODES = st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
BLANK = st.sampled_from([b"", b"", b"", b"\n", b"\r\n", b" \t\n\n"])
ALL = Fields("name", "proof", "task", "head", "start")


@contextmanager
def file_of(data: bytes) -> Iterator[str]:
    """A JSONL file; hypothesis runs its examples in one test, which has one ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_bytes(data)
        yield str(path)


def read(path: str | Path, fields: Fields = Fields()) -> list[Row | BadRow]:  # noqa: B008
    return list(open_data(str(path), fields).rows())


def lines(path: Path, *texts: str | bytes) -> list[Row | BadRow]:
    parts = (text.encode() if isinstance(text, str) else text for text in texts)
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    return read(path)


def resumes_everywhere(data: Data) -> None:
    """From each row's ``next``, the rest is exactly what it was."""
    whole = list(data.rows())
    for place, row in enumerate(whole, 1):
        assert list(data.rows(row.line + 1, row.next)) == whole[place:]


def peak_bytes(rows: Iterable[object]) -> int:
    tracemalloc.start()
    try:
        for _ in rows:
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# JSONL


@given(
    rows=st.lists(st.tuples(IDS, CODES, BLANK, st.booleans(), st.sampled_from(["\n", "\r\n"]))),
    mark=st.booleans(),
    last_ends=st.booleans(),
)
def test_jsonl_comes_back_as_it_was_written(
    rows: list[tuple[Any, Any, bytes, bool, str]], mark: bool, last_ends: bool
) -> None:
    data, line, expected = b"\xef\xbb\xbf" * mark, 1, []
    for name, code, blank, escaped, end in rows:
        data += blank
        line += blank.count(b"\n")
        expected.append((line, name, tuple(code) if isinstance(code, list) else (code,)))
        data += json.dumps({"id": name, "code": code}, ensure_ascii=escaped).encode()
        data += end.encode()
        line += 1
    if rows and not last_ends:
        data = data.rstrip(b"\r\n")
    with file_of(data) as path:
        opened = open_data(path, Fields())
        found = list(opened.rows())
        assert [(r.line, r.id, r.codes) for r in found if isinstance(r, Row)] == expected
        assert [isinstance(r, Row) and r.listed for r in found] == [
            isinstance(code, list) for _, code, *_ in rows
        ]
        assert opened.total() == len(rows)
        resumes_everywhere(opened)


@given(st.lists(st.sampled_from([b"\n", b" ", b"\r", b"\0", b"{}", b"[", b'{"id": 1}', b"\xff"])))
def test_any_bytes_are_rows_good_or_bad(parts: list[bytes]) -> None:
    with file_of(b"".join(parts)) as path:
        opened = open_data(path, Fields())
        found = list(opened.rows())
        assert opened.total() == len(found)
        assert all(isinstance(row, BadRow) for row in found)
        resumes_everywhere(opened)


def test_a_text_is_header_prompt_and_code(tmp_path: Path) -> None:
    path = tmp_path / "data.ndjson"
    records = [
        {"name": 7, "task": "t", "head": "import A", "start": "theorem x", "proof": " := rfl"},
        {"name": "b", "task": 0, "head": "import A\n", "start": None, "proof": ["1", "2"]},
        {"name": "c", "task": "t", "proof": "3"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = [(r.id, r.problem, r.codes, r.listed) for r in read(path, ALL) if isinstance(r, Row)]
    assert rows == [
        (7, "t", ("import A\ntheorem x := rfl",), False),
        ("b", 0, ("import A\n1", "import A\n2"), True),
        ("c", "t", ("3",), False),
    ]


@pytest.mark.parametrize(
    ("text", "error", "name"),
    [
        ('{"id": 1', "no JSON: Expecting ',' delimiter at column 9", None),
        ("[1]", "no JSON object", None),
        ("null", "no JSON object", None),
        (b'{"id": "\xff"}', "no UTF-8 text: byte 9 is 0xff", None),
        ("[" * 100_000, "JSON that is nested too deeply", None),
        ('{"id": ' + "1" * 5000 + "}", "JSON with a number of too many digits", None),
        ('{"code": "x"}', "the field 'id' is missing", None),
        ('{"id": null, "code": "x"}', "the field 'id' is null", None),
        (
            '{"id": true, "code": "x"}',
            "the field 'id' is true or false; it must be a text or a whole number",
            None,
        ),
        (
            '{"id": 1.0, "code": "x"}',
            "the field 'id' is a number; it must be a text or a whole number",
            None,
        ),
        (
            '{"id": NaN, "code": "x"}',
            "the field 'id' is a number; it must be a text or a whole number",
            None,
        ),
        (
            '{"id": "\\ud800", "code": "x"}',
            "the field 'id' is no Unicode text: half of a surrogate pair, U+D800",
            None,
        ),
        ('{"id": 1}', "the field 'code' is missing", 1),
        ('{"id": 1, "code": null}', "the field 'code' is null", 1),
        (
            '{"id": "a", "code": {"x": 1}}',
            "the field 'code' is an object; it must be a text or a list of texts",
            "a",
        ),
        ('{"id": "a", "code": []}', "the field 'code' is an empty list", "a"),
        (
            '{"id": "a", "code": ["x", 2]}',
            "the field 'code' is a list whose element 1 is a number",
            "a",
        ),
        (
            '{"id": "a", "code": ["x", "y\\udfff"]}',
            "the field 'code' is no Unicode text: half of a surrogate pair, U+DFFF",
            "a",
        ),
    ],
)
def test_a_bad_row_is_told_and_the_rest_is_read(
    tmp_path: Path, text: str | bytes, error: str, name: str | int | None
) -> None:
    good = '{"id": "good", "code": "x"}'
    before, bad, after = lines(tmp_path / "data.jsonl", good, text, good)
    assert isinstance(before, Row)
    assert isinstance(after, Row)
    assert (before.line, after.line, after.codes) == (1, 3, ("x",))
    assert isinstance(bad, BadRow)
    assert (bad.line, bad.id, bad.error) == (2, name, error)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"task": None}, "the field 'task' is null"),
        (
            {"task": False},
            "the field 'task' is true or false; it must be a text or a whole number",
        ),
        ({"head": 3}, "the field 'head' is a number; it must be a text"),
        ({"start": ["x"]}, "the field 'start' is a list; it must be a text"),
        (
            {"start": "\ud800"},
            "the field 'start' is no Unicode text: half of a surrogate pair, U+D800",
        ),
    ],
)
def test_fields_beside_the_code_can_be_bad(
    tmp_path: Path, record: dict[str, Any], error: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"name": "n", "proof": "p", "task": "t", **record}))
    [bad] = read(path, ALL)
    assert isinstance(bad, BadRow)
    assert (bad.id, bad.error) == ("n", error)


def test_of_fields_with_one_name_the_last_counts(tmp_path: Path) -> None:
    [row] = lines(tmp_path / "data.jsonl", '{"id": 1, "code": "a", "id": 2, "code": "b"}')
    assert isinstance(row, Row)
    assert (row.id, row.codes) == (2, ("b",))


def test_an_error_is_short_whatever_the_field_is_called(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{}")
    [bad] = read(path, Fields(id="x\n" * 5000))
    assert isinstance(bad, BadRow)
    assert len(bad.error) < 200
    assert "\n" not in bad.error


@pytest.mark.parametrize("letter", ["x", "é", "𝔸"])
def test_a_text_may_have_as_many_bytes_as_a_request_takes(tmp_path: Path, letter: str) -> None:
    path = tmp_path / "data.jsonl"
    fits = letter * (MAX_CODE_BYTES // len(letter.encode()))
    for record in ({"name": 1, "proof": fits}, {"name": 2, "head": "12345", "proof": ["", fits]}):
        with path.open("a") as out:
            print(json.dumps(record), file=out)
    fields = Fields("name", "proof", header="head")
    good, bad = read(path, fields)
    assert isinstance(good, Row)
    options = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "timeout_s": 99.5}
    request = Request("check", code=good.codes[0], allow_axioms=("Classical.choice",), **options)
    assert len(pack_request(request)) <= MAX_REQUEST_BYTES
    assert isinstance(bad, BadRow)
    size = len(fits.encode()) + 6  # the header has no newline of its own
    assert bad.error == f"the code has {size} bytes; at most {MAX_CODE_BYTES} are taken"


def test_a_line_that_is_too_long_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 20)
    path, good = tmp_path / "data.jsonl", b'{"id": 1, "code": "x"}'
    exactly = good.ljust(1 << 20)
    with path.open("wb") as out:
        out.write(exactly + b"\n")
        out.write(b'{"id": 2, "code": "')
        out.seek(64 << 20, os.SEEK_CUR)
        out.write(b'"}\n' + good + b"\n" + exactly + b" ")
    opened = open_data(str(path), Fields())
    assert peak_bytes(opened.rows()) < 8 << 20
    first, long, after, last = opened.rows()
    assert isinstance(first, Row)
    assert isinstance(long, BadRow)
    size = (64 << 20) + 22
    assert long.error == f"the line has {size} bytes; at most {1 << 20} are read"
    assert isinstance(after, Row)
    assert after.line == 3
    assert isinstance(last, BadRow)
    assert last.error == f"the line has {(1 << 20) + 1} bytes; at most {1 << 20} are read"
    assert peak_bytes([opened.total()]) < 8 << 20
    assert opened.total() == 4
    resumes_everywhere(opened)


def test_memory_is_flat_for_any_number_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = json.dumps({"id": 1, "code": "x" * 1000}) + "\n"
    path.write_text(row * 20_000)
    opened = open_data(str(path), Fields())
    assert peak_bytes(opened.rows()) < 4 << 20
    # Somewhat more, for a chunk in pieces.
    tracemalloc.start()
    try:
        assert opened.total() == 20_000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", ["longer", "beginning", "end"])
def test_other_data_has_another_fingerprint(tmp_path: Path, change: str) -> None:
    path = tmp_path / "data.jsonl"
    text = '{"id": 1, "code": "x"}\n' * 10_000
    path.write_text(text)
    before = open_data(str(path), Fields()).fingerprint
    os.utime(path, (1, 1))
    assert open_data(str(path), Fields()).fingerprint == before
    changed = {
        "longer": text + " ",
        "beginning": text.replace("1", "2", 1),
        "end": text[:-5] + 'y"}\n\n',
    }
    path.write_text(changed[change])
    assert open_data(str(path), Fields()).fingerprint != before


# A folder


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_a_folder_is_sorted_by_whole_paths(tmp_path: Path) -> None:
    names = ["a.lean", "a/b.lean", "a-b.lean", "a/b/c.lean", "a/b-c.lean", "ab.lean", "Z/é.lean"]
    put(tmp_path, {name: name.encode() for name in names})
    put(tmp_path, {"notes.txt": b"", ".lake/x.lean": b"", ".hidden.lean": b"", "a/.lean": b""})
    (tmp_path / "folder.lean").mkdir()
    opened = open_data(str(tmp_path), Fields())
    rows = list(opened.rows())
    assert [row.id for row in rows] == sorted(names)
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert all(isinstance(row, Row) and row.codes == (row.id,) for row in rows)
    assert opened.total() == 7
    assert read(f"{tmp_path}/") == rows
    resumes_everywhere(opened)


def test_files_that_cannot_be_checked_are_bad_rows(tmp_path: Path) -> None:
    put(tmp_path, {"bytes.lean": b"ab\xff", "good.lean": "∀".encode()})
    with (tmp_path / "large.lean").open("wb") as out:
        out.truncate(MAX_CODE_BYTES + 1)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "loop.lean").symlink_to(tmp_path / "loop.lean")
    (tmp_path / "gone.lean").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked.lean").symlink_to(tmp_path / "good.lean")
    os.mkfifo(tmp_path / "pipe.lean")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/name\xff.lean")).write_bytes(b"x")
    opened = open_data(str(tmp_path), Fields())
    found = {r.id: r.error if isinstance(r, BadRow) else r.codes for r in opened.rows()}
    assert found == {
        "bytes.lean": "no UTF-8 text: byte 3 is 0xff",
        "gone.lean": "No such file or directory",
        "good.lean": ("∀",),
        "large.lean": f"the code has {MAX_CODE_BYTES + 1} bytes; at most {MAX_CODE_BYTES} are taken",
        "linked.lean": ("∀",),
        "loop.lean": "Too many levels of symbolic links",
        "name\\xff.lean": ("x",),
        "pipe.lean": "no regular file",
    }
    resumes_everywhere(opened)


def test_a_folder_with_other_names_or_sizes_is_another(tmp_path: Path) -> None:
    put(tmp_path, {"a.lean": b"1", "b.lean": b"2"})
    seen = [open_data(str(tmp_path), Fields()).fingerprint for _ in range(2)]
    assert seen[0] == seen[1]
    (tmp_path / "a.lean").write_bytes(b"12")
    seen.append(open_data(str(tmp_path), Fields()).fingerprint)
    (tmp_path / "b.lean").rename(tmp_path / "c.lean")
    seen.append(open_data(str(tmp_path), Fields()).fingerprint)
    assert len(set(seen)) == 3


# Parquet


def table(path: Path, group: int = 1 << 20, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


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
        opened = open_data(str(path), Fields())
        found = [(r.line, r.next, r.id, r.codes) for r in opened.rows() if isinstance(r, Row)]
        assert found == [(n, n, name, (code,)) for n, (name, code) in enumerate(rows, 1)]
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
    assert good == Row(1, 1, 1, "t", ("a", "b"), True)
    assert bad == [
        BadRow(2, 2, None, "the field 'name' is null"),
        BadRow(3, 3, 3, "the field 'proof' is a list whose element 1 is null"),
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


def test_a_row_group_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    columns = pa.table({"id": range(600), "code": [secrets.token_hex(32_000) for _ in range(600)]})
    pq.write_table(columns, path, use_dictionary=False, write_batch_size=16)
    del columns
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in open_data(str(path), Fields()).rows()]
    assert len(held) == 600
    assert pq.read_metadata(path).num_row_groups == 1
    assert 0 < max(held) < 20 << 20 < path.stat().st_size


def test_without_pyarrow_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "data.parquet", id=[1], code=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"needs pyarrow, .* \(pip install pyarrow\)"):
        open_data(str(path), Fields())


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
        (lambda _: "x\0", "null byte"),
        (lambda folder: folder, "there are no .lean files"),
        (_no_columns, "has no one column 'code'; it has 'id', 'text'"),
        (_no_parquet, "data.parquet: "),
        (_array, "is a JSON array"),
        (_pipe, "neither a file nor a folder"),
        (_other, "is no data set"),
    ],
)
def test_what_is_no_data_set(tmp_path: Path, make: Callable[[Path], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        open_data(str(make(tmp_path)), Fields())
    assert "\n" not in str(raised.value)


def test_a_folders_files_have_no_fields(tmp_path: Path) -> None:
    put(tmp_path, {"a.lean": b""})
    with pytest.raises(UsageError, match="no fields"):
        open_data(str(tmp_path), Fields(problem="p"))


def test_data_may_go_while_it_is_read(tmp_path: Path) -> None:
    put(tmp_path / "folder", {"a.lean": b""})
    put(tmp_path, {"a.jsonl": b"{}"})
    table(tmp_path / "a.parquet", id=[1], code=["x"])
    for name in ("folder", "a.jsonl", "a.parquet"):
        opened = open_data(str(tmp_path / name), Fields())
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
        with pytest.raises(UsageError, match=f"{name}.*: No such file or directory"):
            list(opened.rows())


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    path = table(tmp_path / "data.parquet", id=range(5000), code=[secrets.token_hex(50)] * 5000)
    data = bytearray(path.read_bytes())
    data[4:20_000] = bytes(19_996)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"data\.parquet: "):
        read(path)


def test_the_margin_is_within_the_limit() -> None:
    assert 0 < MAX_REQUEST_BYTES - fields_module.MAX_CODE_BYTES < 1 << 16
