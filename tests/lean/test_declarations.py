"""Declarations of texts, and texts made of others, on real Lean."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from support.terminals import Terminal, ended

from leanq.errors import InvalidRequestError, UsageError
from leanq.lean.declarations import Declaration, extract
from leanq.lean.environment import Environment
from leanq.lean.lean_driver import LeanDriver
from leanq.lean.rewrites import (
    with_contradiction,
    with_lemmas,
    with_negation,
    with_statements,
)
from leanq.queue.requests import Reply, Request, Sorry
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


async def check(driver: LeanDriver, text: str) -> Reply:
    return await driver.run(Request(op="check", code=text))


def statements(found: dict[str, Declaration]) -> dict[str, tuple[str, str | None]]:
    return {each.name: (each.kind, each.statement) for each in found.values()}


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
async def test_theorems_become_statements_that_mean_the_same(driver: LeanDriver) -> None:
    found = await declared(driver, TEXT)
    made = with_statements(TEXT, list(found.values()))
    again = await declared(driver, made)
    assert statements(again) == statements(found)
    names = ("swap", "poly", "use", "mat", "alt", "both", "bound")
    theorems = [again[f"A.{name}"] for name in names]
    assert all(each.axioms == ("sorryAx",) for each in theorems)
    # The result is a target, and the text behind it proves this target.
    target = with_statements(
        only := TEXT.replace("axiom cheat : False\n", "")
        .replace("theorem use (p : Prop) : twice p → False := fun _ => cheat\n", "")
        .replace("by\n  sorry", "rfl"),
        list((await declared(driver, only)).values()),
    )
    reply = await driver.run(Request(op="verify", target=target, code=only))
    assert reply.verdict == "accepted", reply


@pytest.mark.slow
async def test_sorries_become_lemmas_that_prove_them(driver: LeanDriver) -> None:
    text = """\
def keep := True
theorem swap (p q : Prop) (h : And p q) : And q p := by
  constructor
  sorry
  sorry
/-- A doc. -/
theorem term (p q : Prop) (f : p → q)
    (h : p) : q := id sorry
"""
    sorries = (await check(driver, text)).sorries
    assert len(sorries) == 3
    before = await declared(driver, text)
    made = with_lemmas(text, list(before.values()), sorries, "lemma_")
    found = await declared(driver, made)
    assert {name: each for name, each in statements(found).items() if name in before} == (
        statements(before)
    )
    assert found["lemma_1"].statement == "∀ (p q : Prop), p ∧ q → q"
    assert found["swap"].local == ("lemma_1", "lemma_2")
    assert found["term"].local == ("lemma_3",)
    proved = (
        made.replace("p ∧ q) : q := sorry", "p ∧ q) : q := h.right")
        .replace("p ∧ q) : p := sorry", "p ∧ q) : p := h.left")
        .replace("(h : p) : q := sorry", "(h : p) : q := f h")
    )
    assert (await check(driver, proved)).verdict == "accepted"


@pytest.mark.slow
async def test_a_negation_refutes_what_was_stated(driver: LeanDriver) -> None:
    text = (
        "def n := True\nnamespace B\ntheorem t.{u} (α : Sort u) (p q : Prop) (h : p) : q := sorry"
    )
    found = await declared(driver, text)
    made = with_negation(text, found["B.t"], "no")
    again = await declared(driver, made)
    assert "B.t" not in again
    assert again["B.no"].universes == ("u",)
    proof = "fun h => h PUnit True False True.intro"
    told = await check(driver, made.replace("sorry", proof))
    assert told.verdict in ("accepted", "rejected"), told
    plain = "theorem t (p q : Prop) (h : p) : q := sorry"
    made = with_negation(plain, (await declared(driver, plain))["t"], "no")
    refuted = made.replace("sorry", "fun h => h True False True.intro")
    assert (await check(driver, refuted)).verdict == "accepted"
    both = f"{plain}\n{refuted}theorem contradiction : False := no t\n"
    assert (await check(driver, both)).verdict == "incomplete"


@pytest.mark.slow
async def test_a_new_declaration_binds_no_universe_that_the_text_names(driver: LeanDriver) -> None:
    text = """universe u v
section
universe w
theorem a (α : Sort u) (β : Sort v) (s : Sort w) (h : And (α = α) (β = β)) : s = s := sorry
end
theorem b.{w} (α : Sort u) (β : Sort w) : And (α = α) (β = β) := sorry
theorem c (s : Type _) (α : Type u) : And (s = s) (α = α) := sorry
universe w"""
    found = await declared(driver, text)
    for name, universes in {"a": "", "b": ".{w}", "c": ".{u_1}"}.items():
        made = with_negation(text, found[name], "no")
        assert f"theorem no{universes} :" in made
        again = (await declared(driver, made))["no"]
        assert sorted(again.universes) == sorted(found[name].universes)
        both = with_contradiction(text, found[name], "no")
        assert (await check(driver, both)).verdict == "incomplete"
    made = with_lemmas(text, list(found.values()), (await check(driver, text)).sorries, "lemma_")
    assert (await check(driver, made)).verdict == "incomplete"


def test_what_cannot_be_made_is_told() -> None:
    owner = Declaration("t", "theorem", None, (), (), (), (), 1, 0, 1, 9)
    for goal in (None, "p : Prop", "a✝ : p\n⊢ p", "x : Nat := 1\n⊢ p", "⊢ p\n\n⊢ q"):
        with pytest.raises(UsageError, match="sorry at line 1"):
            with_lemmas("sorry", [owner], [Sorry(1, 0, goal)], "l")
    with pytest.raises(UsageError, match="no sorry at line 1, column 3"):
        with_lemmas("sorry", [owner], [Sorry(1, 3, "⊢ p")], "l")
    with pytest.raises(UsageError, match="in no declaration"):
        with_lemmas("sorry", [], [Sorry(1, 0, "⊢ p")], "l")
    with pytest.raises(UsageError, match="proof of t"):
        with_statements("theorem t", [owner])
    with pytest.raises(UsageError, match="no theorem with a statement"):
        with_negation("theorem t", owner, "no")


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
    for make, expected in {
        "statements": "And q p := sorry",
        "lemmas": "theorem sorry_lemma_1",
        "negation": "theorem negation",
    }.items():
        options = ("--theorem", "A.swap") if make == "negation" else ()
        done = ended(terminal.start("extract", file, "--make", make, *options))
        assert (done.code, expected in done.out) == (0, True), done
    bad = terminal.file("bad.lean", "theorem t : False := nonsense")
    done = ended(terminal.start("extract", bad))
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith("leanq: the text does not compile: line 1")
    number = "def A := Nat\ntheorem t : @OfNat.ofNat A 2 ⟨Nat.zero⟩ = Nat.zero := rfl"
    for options, code in {"": 2, "set_option pp.explicit true\n": 0}.items():
        other = terminal.file("other.lean", f"{options}{number}")
        done = ended(terminal.start("extract", other, "--make", "negation"))
        assert (done.code, "reads that otherwise" in done.err) == (code, code == 2), done
    assert ended(terminal.start("extract", file, "--theorem", "x")).code == 2
