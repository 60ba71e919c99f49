"""Frames of the language server protocol, cut anywhere, and positions in UTF-16."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.errors import LanguageServerError
from leanq.lean.run.protocol import (
    Frames,
    Incoming,
    Places,
    Told,
    frame,
    is_out_of_order,
    messages_of,
)
from leanq.queue.requests import Message

JSON = st.recursive(
    st.none() | st.integers(-10, 10) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
TEXTS = st.text(st.sampled_from("ab \n𝔸αé\t"), max_size=30)


@given(st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=5), st.data())
def test_frames_cut_anywhere_are_the_same(
    params: list[dict[str, object]], data: st.DataObject
) -> None:
    sent = b"".join(frame("m", each, number) for number, each in enumerate(params))
    frames, got, at = Frames(1 << 20), [], 0
    while at < len(sent):
        end = data.draw(st.integers(at + 1, len(sent)))
        got += list(frames.take(sent[at:end]))
        at = end
    assert [(each.method, each.id, json.loads(bytes(each.params))) for each in got] == [
        ("m", number, each) for number, each in enumerate(params)
    ]


@given(st.binary(max_size=200), st.integers(0, 3))
def test_what_is_no_frame_is_one_kind_of_error(noise: bytes, before: int) -> None:
    frames = Frames(1 << 20)
    try:
        for message in frames.take(frame("m", {}) * before + noise):
            Told(1).take(message)
    except LanguageServerError:
        pass


@pytest.mark.parametrize(
    "printed",
    [
        b"hello\r\n\r\n",
        b"Content-Length: 3\r\n\r\n{]}",
        b"Content-Length: 99999999\r\n\r\n",
        b'Content-Length: 9\r\n\r\n{"id": []}',
        b"x" * 2000,
    ],
)
def test_noise_is_refused(printed: bytes) -> None:
    with pytest.raises(LanguageServerError):
        list(Frames(1 << 20).take(printed))


@given(TEXTS, st.data())
def test_positions_are_those_of_code_points(text: str, data: st.DataObject) -> None:
    lines = text.split("\n")
    line = data.draw(st.integers(0, len(lines) - 1))
    column = data.draw(st.integers(0, len(lines[line])))
    units = sum(1 + (ord(each) > 0xFFFF) for each in lines[line][:column])
    assert Places(text).units(line + 1, column) == {"line": line, "character": units}
    if column == len(lines[line]):
        # Lean names such places, too.
        behind = data.draw(st.integers(0, 2))
        column, units = column + behind, units + behind
    body = {"start": {"line": line, "character": units}, "end": {"line": line, "character": units}}
    said = {"version": 2, "diagnostics": [{"range": body, "message": "m", "severity": 2}]}
    (message,) = Frames(1 << 20).take(frame("textDocument/publishDiagnostics", said))
    told, other = Told(2), Told(1)
    other.take(message)
    assert not other.diagnostics
    told.take(message)
    ((found, _),) = messages_of(text, told.diagnostics)
    assert (found.severity, found.line, found.column) == ("warning", line + 1, column)


def test_diagnostics_are_added_or_told_anew() -> None:
    told = Told(7)
    for severity, is_incremental in ((1, None), (2, True), (1, True)):
        told.take(diagnostic(severity, is_incremental))
    assert (len(told.diagnostics), told.errors) == (3, 2)
    told.take(diagnostic(1, False))
    assert (len(told.diagnostics), told.errors) == (1, 1)


def diagnostic(severity: int, is_incremental: bool | None) -> Incoming:
    place = {"start": {"line": 0, "character": 0}, "end": {"line": 0, "character": 1}}
    params: dict[str, object] = {
        "version": 7,
        "diagnostics": [{"range": place, "message": "m", "severity": severity}],
        "isIncremental": is_incremental,
    }
    (message,) = Frames(1 << 20).take(frame("textDocument/publishDiagnostics", params))
    return message


TEXT = "def f := 1\n\ntheorem t : p := by\n  simp\n  exact x\n\ntheorem u : q := y\n"
SORRY = "declaration uses `sorry`"


@pytest.mark.parametrize(
    ("places", "is_doubtful"),
    [
        ([(3, "error"), (5, "error"), (7, "error")], False),
        ([(4, SORRY), (5, "error")], True),
        ([(4, SORRY), (4, SORRY), (5, "error")], True),
        ([(5, SORRY), (4, "error")], True),
        ([(4, "error"), (5, SORRY), (7, "error")], False),
        ([(3, SORRY), (3, SORRY), (7, SORRY)], False),
        ([(4, "(kernel) declaration has metavariables"), (5, "error")], True),
    ],
)
def test_messages_behind_a_checked_declaration_may_stand_elsewhere(
    places: list[tuple[int, str]], is_doubtful: bool
) -> None:
    messages = [
        Message("warning" if text == SORRY else "error", line, 0, text) for line, text in places
    ]
    assert is_out_of_order(TEXT, messages) is is_doubtful
