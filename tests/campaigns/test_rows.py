"""JSONL: every row as it stands there, from any row on, whatever else stands there."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.campaigns.data_sets import ALL, TEXTS, read, resumes_everywhere

from leanq.campaigns.dataset import MAX_CODE_BYTES, BadRow, Fields, Row, jsonl, open_dataset
from leanq.queue.requests import Request
from leanq.queue.settings import MAX_REQUEST_BYTES
from leanq.queue.wire import pack_request

IDS = st.one_of(TEXTS, st.integers())
CODES = st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
BLANK = st.sampled_from([b"", b"", b"", b"\n", b"\r\n", b" \t\n\n"])


@contextmanager
def file_of(data: bytes) -> Iterator[str]:
    """A JSONL file; hypothesis runs its examples in one test, which has one ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_bytes(data)
        yield str(path)


def lines(path: Path, *texts: str | bytes) -> list[Row | BadRow]:
    parts = (text.encode() if isinstance(text, str) else text for text in texts)
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    return read(path)


def peak_bytes(rows: Iterable[object]) -> int:
    tracemalloc.start()
    try:
        for _ in rows:
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
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
        codes = code if isinstance(code, list) else [code]
        expected.append((line, name, tuple((each,) for each in codes)))
        data += json.dumps({"id": name, "code": code}, ensure_ascii=escaped).encode()
        data += end.encode()
        line += 1
    if rows and not last_ends:
        data = data.rstrip(b"\r\n")
    with file_of(data) as path:
        opened = open_dataset(path, Fields())
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
        opened = open_dataset(path, Fields())
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
        (7, "t", (("import A\ntheorem x := rfl",),), False),
        ("b", 0, (("import A\n1",), ("import A\n2",)), True),
        ("c", "t", (("3",),), False),
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
    assert (before.line, after.line, after.codes) == (1, 3, (("x",),))
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
    assert (row.id, row.codes) == (2, (("b",),))


def test_an_error_is_short_whatever_the_field_is_called(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{}")
    [bad] = read(path, Fields(id="x\n" * 5000))
    assert isinstance(bad, BadRow)
    assert len(bad.error) < 200
    assert "\n" not in bad.error


@pytest.mark.slow
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
    request = Request("check", code=good.codes[0][0], allow_axioms=("Classical.choice",), **options)
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
    opened = open_dataset(str(path), Fields())
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


@pytest.mark.slow
def test_memory_is_flat_for_any_number_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = json.dumps({"id": 1, "code": "x" * 1000}) + "\n"
    path.write_text(row * 20_000)
    opened = open_dataset(str(path), Fields())
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
    before = open_dataset(str(path), Fields()).fingerprint
    os.utime(path, (1, 1))
    assert open_dataset(str(path), Fields()).fingerprint == before
    changed = {
        "longer": text + " ",
        "beginning": text.replace("1", "2", 1),
        "end": text[:-5] + 'y"}\n\n',
    }
    path.write_text(changed[change])
    assert open_dataset(str(path), Fields()).fingerprint != before


def test_a_field_without_a_name_is_read_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": 1, "code": "rfl", "": "text"}\n{"id": 2, "code": "rfl"}\n')
    (row, without) = read(path, Fields(target=""))
    assert isinstance(row, Row)
    assert row.target == "text"
    assert isinstance(without, BadRow)
    for fields, code, tags in (
        (Fields(header=""), "text\nrfl", ()),
        (Fields(prompt=""), "textrfl", ()),
        (Fields(tags=""), "rfl", ("text",)),
    ):
        row = read(path, fields)[0]
        assert isinstance(row, Row)
        assert (row.codes, row.tags) == (((code,),), tags)
