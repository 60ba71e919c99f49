"""The tactics of whole proofs as rows of traces: state, tactic, next state."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.campaigns.traces import read_traces
from support.terminals import Terminal

from leanq.campaigns.traces.tactics import steps_of
from leanq.client import AsyncLeanQClient
from leanq.queue.requests import Tactic
from leanq.queue.settings import Settings

TEXT = """theorem t : a ∧ b ∧ c := by
  have h : x := by
    exact
      one
  refine ⟨?_, ?_, ?_⟩ <;> skip
  · rw [one,
      two]
    exact two -- the end
  · exact (by simp)
  exact three
"""
# By line and column.
GOALS = {
    (2, 2): ("T",),
    (3, 4): ("X",),
    (5, 2): ("H",),
    (5, 26): ("A", "B", "C"),
    (6, 4): ("A",),
    (8, 4): ("A2",),
    (9, 4): ("B",),
    (9, 14): ("B",),
    (10, 2): ("C",),
}
TOLD = [Tactic(line, column, goals) for (line, column), goals in GOALS.items()]


def test_what_a_tactic_leaves_stands_before_the_next_of_its_block() -> None:
    assert [tuple(each) for each in steps_of(TEXT, TOLD, is_proved=True)] == [
        ("have h : x := by\n  exact\n    one", ("T",), ("H",)),
        ("exact\n  one", ("X",), ()),
        ("refine ⟨?_, ?_, ?_⟩", ("H",), ("A", "B", "C")),
        ("skip", ("A", "B", "C"), ("A", "B", "C")),
        ("rw [one,\n  two]", ("A",), ("A2",)),
        ("exact two", ("A2",), ()),
        ("exact (by simp)", ("B",), ()),
        ("simp", ("B",), ()),
        ("exact three", ("C",), ()),
    ]


def test_the_end_of_a_proof_that_fails_is_not_known() -> None:
    told = [each for each in TOLD if each.line < 9]
    found = {each.text: each.after for each in steps_of(TEXT, told, is_proved=False)}
    assert found["exact two"] is None
    assert found["skip"] is None
    assert found["rw [one,\n  two]"] == ("A2",)
    assert steps_of(TEXT, [], is_proved=True) == []


@given(st.lists(st.sampled_from([*"\n ·;|<>=(⟨⟩),", "by", "  ", "=>", "case"]), max_size=60))
def test_any_text_has_steps(parts: list[str]) -> None:
    code = "".join(parts)
    told = [
        Tactic(line, column, ("g",))
        for line, text in enumerate(code.split("\n"), 1)
        for column in range(len(text))
    ]
    for step in steps_of(code, told, is_proved=True):
        assert step.before == ("g",)
        assert step.after is not None


@pytest.mark.slow
def test_proofs_become_training_data(terminal: Terminal, fleet: Settings) -> None:
    recorded = terminal.folder / "recorded"
    lines = ["theorem t (p q : Prop) (h : p) (k : q) : p ∧ q := by", "  constructor"]
    proved = "\n".join([*lines, "  · exact h", "  · exact k", ""])
    failed = "\n".join([*lines, "  exact h", "  exact h", ""])

    async def play() -> None:
        async with AsyncLeanQClient(fleet, record=recorded) as lean:
            for code in (proved, failed, proved):
                reply = await lean.check(code, goals=True, labels={"problem": 1})
                assert [each.line for each in reply.tactics] == [2, 3, 4]

    asyncio.run(play())
    terminal.use(fleet)
    assert terminal.run("export-traces", str(recorded), "--out", "traces").code == 0
    rows = [row for row in read_traces(Path(terminal.folder, "traces")) if row["op"] == "tactic"]
    context = "p q : Prop\nh : p\nk : q\n⊢ "
    whole = [f"{context}p ∧ q"]
    left, right = (
        [f"case {case}\n{context}{goal}"] for case, goal in (("left", "p"), ("right", "q"))
    )
    accepted = [
        ("constructor", whole, left + right),
        ("exact h", left, []),
        ("exact k", right, []),
    ]
    rejected = [
        ("constructor", whole, left + right),
        ("exact h", left + right, right),
        ("exact h", right, None),
    ]
    for verdict, steps in (("accepted", accepted), ("rejected", rejected)):
        assert [
            (row["text"], row["goals_before"], row["goals_after"])
            for row in rows
            if row["verdict"] == verdict
        ] == steps
    assert {row["problem"] for row in rows} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_campaign_of_proofs_becomes_training_data(client: Terminal, ending: str) -> None:
    data = client.folder / "data.jsonl"
    row = {"id": 1, "statement": "theorem t (p : Prop) (h : p) : p := by sorry"}
    codes = [f"theorem t (p : Prop) (h : p) : p := by\n  {how} h\n" for how in ("exact", "nope")]
    data.write_text(json.dumps({**row, "code": codes}) + "\n")
    out = f"results.{ending}"
    command = ("campaign", "run", str(data), "--out", out, "--target-field", "statement", "--goals")
    assert client.run(*command).code == 1
    assert client.run("export-traces", out, "--out", "traces").code == 0
    rows = read_traces(Path(client.folder, "traces"))
    before = ["p : Prop\nh : p\n⊢ p"]
    assert [
        (row["op"], row["text"], row["goals_before"], row["goals_after"])
        for row in rows
        if row["op"] == "tactic"
    ] == [("tactic", "exact h", before, []), ("tactic", "nope h", before, None)]
    assert [row["op"] for row in rows] == ["verify", "tactic"] * 2
