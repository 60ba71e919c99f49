"""What a text's theorems state: in Lean's words, by the header's notation alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.lean.images import Lean

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.run.olean import read_parts
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header

PRELUDE = "prelude\nimport Core\n"
LIMITS = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


@pytest.fixture
async def judges(core: Environment) -> AsyncIterator[Judges]:
    made = Judges(core, slots=1)
    yield made
    await made.close()


async def judged(judges: Judges, lean: Lean, code: str) -> Judgement:
    parts = read_parts(lean.compile(code))
    found = await judges.judge(split_header(code), parts, ("none", "here"), LIMITS)
    assert found.proved, found
    return found


async def stated(judges: Judges, lean: Lean, code: str) -> dict[str, str]:
    found = await judged(judges, lean, code)
    return dict(zip(found.theorems, found.statements, strict=True))


async def test_theorems_come_in_the_texts_order_with_what_they_state(
    judges: Judges, lean: Lean
) -> None:
    code = f"""{PRELUDE}
def double (n : Nat) : Nat := n + n
theorem zz (p q : Prop) (h : p ∧ q) : q ∧ p := ⟨h.right, h.left⟩
theorem b : 3 ≤ 5 := by decide
theorem a : double 3 = 6 := rfl
namespace N
theorem zz.{{v}} (α : Sort v) (x : α) : x = x := rfl
end N
"""
    found = await judged(judges, lean, code)
    assert [*zip(found.theorems, found.statements, strict=True)] == [
        ("zz", "∀ (p q : Prop), p ∧ q → q ∧ p"),
        ("b", "3 ≤ 5"),
        ("a", "double 3 = 6"),
        ("N.zz", "∀ (α : Sort v) (x : α), x = x"),
    ]


async def test_statements_that_were_not_asked_for_are_not_printed(
    judges: Judges, lean: Lean
) -> None:
    code = f"{PRELUDE}theorem a (p : Prop) (h : p) : p := h\ntheorem b : True := trivial\n"
    parts = read_parts(lean.compile(code))
    # The same process goes on with the files of a tenant.
    for asked in (True, False, True):
        found = await judges.judge(
            split_header(code), parts, ("none", "here"), LIMITS, "one", statements=asked
        )
        assert found.proved
        assert found.theorems == ("a", "b")
        printed = ("∀ (p : Prop), p → p", "True")
        assert found.statements == (printed if asked else (None, None))


# A declaration of the text in an argument that Lean leaves out.
HIDDEN = {
    "instance always : LE Nat := ⟨fun _ _ => True⟩\ntheorem t (n : Nat) : n ≤ 3 := True.intro": (
        "@LE.le Nat always n "
    ),
    # Where a variable has the name, Lean says whose name it is.
    "instance always : LE Nat := ⟨fun _ _ => True⟩\n"
    "theorem t (always : Nat) : always ≤ 3 := True.intro": "@LE.le Nat _root_.always always ",
    "private instance mine : LE Nat := ⟨fun _ _ => True⟩\n"
    "theorem t (n : Nat) : n ≤ 3 := True.intro": "@LE.le Nat mine n ",
    "@[instance_reducible] def five : OfNat Nat (nat_lit 5) := ⟨3⟩\n"
    'theorem t : "five" = "five" → @OfNat.ofNat Nat (nat_lit 5) five = 3 := fun _ => rfl': (
        "@OfNat.ofNat Nat (nat_lit 5) five"
    ),
    "def two : Nat := 2\ntheorem t (f : {n : Nat} → Prop) (h : @f two) : @f two := h": "@f two",
    "def two : Nat := 2\ndef Hides := {n : Nat} → Prop\n"
    "def hides : Hides := fun {n} => n = n\ntheorem t : @hides two := Eq.refl two": "@hides two",
    "instance u : Add Nat := ⟨fun _ _ => 5⟩\n"
    "theorem t : @id ([Add Nat] → Nat) (fun [Add Nat] => 2) u = 2 := rfl": (
        "@id ([Add Nat] → Nat) (fun [Add Nat] => "
    ),
}
SHOWN = {
    "def two : Nat := 2\ntheorem t (n : Nat) : n ≤ two → n ≤ two := fun h => h": (
        "∀ (n : Nat), n ≤ two → n ≤ two"
    ),
    "structure W where\n  n : Nat\ntheorem t (w : W) : w = w := rfl": "∀ (w : W), w = w",
    "instance (priority := 50) last : LE Nat := ⟨fun _ _ => True⟩\n"
    "theorem t (n : Nat) : n ≤ n := Nat.le_refl n": "∀ (n : Nat), n ≤ n",
}


@pytest.mark.parametrize("code", HIDDEN)
async def test_what_the_text_puts_where_notation_hides_it_is_shown(
    judges: Judges, lean: Lean, code: str
) -> None:
    assert HIDDEN[code] in (await stated(judges, lean, PRELUDE + code))["t"]


@pytest.mark.parametrize("code", SHOWN)
async def test_a_statement_that_hides_nothing_of_the_texts_has_notation(
    judges: Judges, lean: Lean, code: str
) -> None:
    assert (await stated(judges, lean, PRELUDE + code))["t"] == SHOWN[code]


@pytest.mark.slow
async def test_no_notation_or_printer_of_the_texts_own_is_used(judges: Judges, lean: Lean) -> None:
    code = f"""{PRELUDE}
set_option pp.all true
set_option pp.maxSteps 1
def falsehood : Prop := True
@[app_unexpander falsehood] def f : Lean.PrettyPrinter.Unexpander := fun _ _ _ => .none
theorem t (h : False) : falsehood := h.elim
theorem u («x : Nat), True ∧ ∀ (y» : Nat) : «x : Nat), True ∧ ∀ (y» = 0 → True :=
  fun _ => True.intro
"""
    found = await stated(judges, lean, code)
    assert found["t"] == "False → falsehood"
    assert found["u"].startswith("∀ («x : Nat), True ∧ ∀ (y» : Nat)")


@pytest.mark.slow
async def test_large_statements_are_cut_and_cost_little(judges: Judges, lean: Lean) -> None:
    terms = [f"q{i - 1} ∧ q{i - 1}" if i else "p ∧ p" for i in range(60)]
    shared = " ".join(f"let q{i} := {term};" for i, term in enumerate(terms))
    large = [f"n = {i}" for i in range(2048)]
    while len(large) > 1:
        large = [f"({a} ∧ {b})" for a, b in zip(large[::2], large[1::2], strict=True)]
    long = " ".join(f"(x{i}{'y' * 50} : Nat)" for i in range(60))
    code = f"""{PRELUDE}
theorem long {long} : True := True.intro
theorem shared (p : Prop) : {shared} q59 → True := fun _ => True.intro
theorem large (n : Nat) : {large[0]} → True := fun _ => True.intro
theorem small : True := True.intro
"""
    found = await judged(judges, lean, code)
    assert found.theorems == ("long", "shared", "large", "small")
    long_, shared_, large_, small = found.statements
    assert (large_, small) == ("", "True")
    assert long_.endswith("…")
    assert "⋯" in shared_ or shared_.endswith("…")
    assert max(map(len, found.statements)) <= 2000


@pytest.mark.slow
async def test_of_many_theorems_the_first_are_printed(judges: Judges, lean: Lean) -> None:
    many = "".join(f"theorem t{i} : True := True.intro\n" for i in range(30))
    found = await judged(judges, lean, PRELUDE + many)
    assert found.theorems == tuple(f"t{i}" for i in range(30))
    assert found.statements == ("True",) * 20 + ("",) * 10
