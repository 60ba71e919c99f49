"""Declarations of texts, on real Lean."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from support.terminals import Terminal, ended

from leanq.errors import InvalidRequestError
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.judge.declarations import Declaration, extract
from leanq.queue.requests import Request
from leanq.states import MemoryStates

TEXT = """\
inductive Pair (p q : Prop) : Prop where
  | mk (a : p) (b : q) : Pair p q
def twice (p : Prop) : Prop := And p p
namespace A
theorem swap (p q : Prop) (h : And p q) : And q p := And.intro h.right h.left
theorem poly.{u} (α : Sort u) (x : α) : α = α := by
  sorry
axiom cheat : False
theorem use (p : Prop) : twice p → False := fun _ => cheat
theorem mat (p q : Prop) (h : Pair p q) : p := by
  match h with
  | .mk a b => exact a
theorem alt (p q : Prop) : Pair p q → p
  | .mk a _ => a
structure Both (p q : Prop) : Prop where
  left : p
  right : q
/-- With a `:=` in its text. -/
theorem both (p : Prop) (h : p) : Both p p where
  left := h
  right := h
theorem bound (p : Prop) : let q := p; q → p := fun h => h
end A
"""


@pytest.fixture
async def driver(core: Environment) -> AsyncIterator[LeanDriver]:
    made = LeanDriver(lambda: core, slots=1, forks=None)
    await made.open(MemoryStates())
    yield made
    await made.close()


async def declared(driver: LeanDriver, text: str) -> dict[str, Declaration]:
    found = await extract(driver.opened.lean, Request(op="check", code=text))
    return {each.name: each for each in found}


@pytest.mark.slow
async def test_what_a_text_declares(driver: LeanDriver) -> None:
    found = await declared(driver, TEXT)
    names = ["Pair", "Pair.mk", "twice", "A.swap", "A.poly", "A.cheat", "A.use", "A.mat"]
    others = ["A.alt", "A.Both", "A.Both.mk", "A.Both.left", "A.Both.right", "A.both", "A.bound"]
    assert list(found) == [*names, *others]
    assert [each.kind for each in found.values()][:6] == [
        *("inductive", "constructor", "definition", "theorem", "theorem", "axiom"),
    ]
    swap = found["A.swap"]
    assert swap.statement == "∀ (p q : Prop), p ∧ q → q ∧ p"
    assert swap.imported == ("And", "And.intro", "And.left", "And.right")
    assert (swap.local, swap.axioms, swap.has_sorry) == ((), (), False)
    assert (swap.line, swap.column, swap.end_line, swap.end_column) == (5, 0, 5, 77)
    poly = found["A.poly"]
    assert (poly.universes, poly.axioms, poly.has_sorry) == (("u",), ("sorryAx",), True)
    assert poly.statement
    assert "Sort u)" in poly.statement
    assert found["A.use"].local == ("A.cheat", "twice")
    assert found["A.use"].axioms == ("A.cheat",)
    # What Lean has made of the match is no name of the text's.
    assert found["A.mat"].local == found["A.alt"].local == ("Pair", "Pair.mk")
    assert not found["A.mat"].axioms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("theorem t : False := nonsense", "does not compile: line 1"),
        ("theorem t (p : Prop) (h : p) : p := h\n#exit\ntheorem u : False := h", "to its end"),
        ("theorem t (p : Prop) (h : p) : p := h /-", "does not compile"),
    ],
)
async def test_what_lean_does_not_take_is_told(driver: LeanDriver, text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        await declared(driver, text)


@pytest.mark.slow
def test_the_command(terminal: Terminal) -> None:
    file = terminal.file("t.lean", TEXT)
    done = ended(terminal.start("extract", "--json", file))
    assert done.code == 0, done
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["name"] for row in rows][3:5] == ["A.swap", "A.poly"]
    assert rows[4]["has_sorry"]
    done = ended(terminal.start("extract", file))
    assert "theorem A.poly.{u} : ∀ (α : Sort u) (x : α)" in done.out
    bad = terminal.file("bad.lean", "theorem t : False := nonsense")
    done = ended(terminal.start("extract", bad))
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith("leanq: the text does not compile: line 1")
