"""Entries of a replay memory as bytes, and batches of them as columns."""

from __future__ import annotations

import math
import re
import sys
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.errors import InvalidRequestError, TooLargeError, UsageError, WireError, to_install
from leanq.queue.requests import Reason, Reply, Sorry, Verdict
from leanq.trainers.replay_entry import (
    MAX_ENTRY_BYTES,
    ReplayBatch,
    ReplayEntry,
    pack_entry,
    read_batch,
    unpack_entry,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
entries = st.builds(
    ReplayEntry,
    verdict=st.sampled_from(get_args(Verdict)),
    text=texts,
    reason=st.none() | st.sampled_from(get_args(Reason)),
    goals=st.lists(texts, max_size=3).map(tuple),
    rewards=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    tags=st.dictionaries(texts, texts, max_size=3),
    weight=st.just(0.0) | st.floats(1e-9, 1e9),
)


@given(entries)
def test_an_entry_comes_back_from_its_bytes(entry: ReplayEntry) -> None:
    assert unpack_entry(pack_entry(entry)) == entry


@given(entries, st.data())
def test_hostile_bytes_are_an_entry_or_a_wire_error(
    entry: ReplayEntry, data: st.DataObject
) -> None:
    packed = bytearray(pack_entry(entry))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(packed)))
        packed[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        found = unpack_entry(bytes(packed))
    except WireError:
        return
    assert unpack_entry(pack_entry(found)) == found


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_a_wire_error(data: bytes) -> None:
    batch = read_batch([(1, data)])
    assert len(batch) + batch.unreadable == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"verdict": "good"}, "Invalid enum value 'good'"),
        ({"text": 5}, "Expected `str`, got `int`"),
        ({"text": "\ud800"}, "surrogates not allowed"),
        ({"tags": {"step": 3}}, "Expected `str`, got `int`"),
        ({"goals": "p"}, "Expected `array`, got `str`"),
        ({"text": object()}, "object is unsupported"),
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        pack_entry(ReplayEntry(**{"verdict": "accepted", "text": "x", **fields}))


def test_an_entry_that_is_too_large_is_refused() -> None:
    with pytest.raises(TooLargeError, match="more than the 1048576 that are allowed"):
        pack_entry(ReplayEntry("accepted", "x" * MAX_ENTRY_BYTES))
    with pytest.raises(WireError, match="at most 1048576 bytes"):
        unpack_entry(bytes(MAX_ENTRY_BYTES + 1))


@pytest.mark.parametrize("weight", [-1.0, 1e-10, 1e10, math.inf, math.nan])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequestError, match="a weight must be 0, or from 1e-09 to 1e\\+09"):
        ReplayEntry("accepted", "x", weight=weight)


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the reward 'proof' must be finite, got nan"):
        ReplayEntry("accepted", "x", rewards={"proof": math.nan})


def test_an_entry_has_the_goals_that_a_reply_left() -> None:
    step = Reply("incomplete", reason="goals_remain", goals=("p", "q"))
    assert ReplayEntry.of(step, "constructor", tags={"problem": "7"}) == ReplayEntry(
        "incomplete", "constructor", "goals_remain", ("p", "q"), tags={"problem": "7"}
    )
    check = Reply("incomplete", reason="sorry", sorries=(Sorry(1, 2, "p", "s"), Sorry(1, 2)))
    assert ReplayEntry.of(check, "sorry").goals == ("p",)
    with pytest.raises(InvalidRequestError, match="an echo has no verdict"):
        ReplayEntry.of(Reply(), "x")


def test_a_batch_is_columns_of_the_same_types_whatever_is_in_it() -> None:
    entry = ReplayEntry("rejected", "x", "lean_error", ("p",), {"proof": 0.5}, {"problem": "7"}, 2)
    full = ReplayBatch([entry, ReplayEntry("accepted", "y")], [8, 9]).to_arrow()
    assert full.to_pylist() == [
        {
            "number": 8,
            "verdict": "rejected",
            "reason": "lean_error",
            "text": "x",
            "goals": ["p"],
            "rewards": [("proof", 0.5)],
            "tags": [("problem", "7")],
            "weight": 2.0,
        },
        {
            "number": 9,
            "verdict": "accepted",
            "reason": None,
            "text": "y",
            "goals": [],
            "rewards": [],
            "tags": [],
            "weight": 1.0,
        },
    ]
    assert ReplayBatch().to_arrow().schema == full.schema


def test_columns_without_pyarrow_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=re.escape(to_install("campaigns"))):
        ReplayBatch().to_arrow()
