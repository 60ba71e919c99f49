"""What theorems state, printed on a full library."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.lean.images import Lean
from support.lean.sites import Site, check
from support.lean.statements import FEW, OF_A_LIBRARY, check_what_is_printed

from leanq.lean.environment import Environment

STATED = {
    # An instance of the text's own is printed where it is used.
    "instance u : Add Nat := ⟨fun _ _ => 5⟩\ntheorem t : (2 + 2 : Nat) = 5 := rfl": (
        "@HAdd.hAdd Nat Nat Nat (@instHAdd Nat u) 2 2 = 5"
    ),
    "instance «Prop» : LE Nat := ⟨fun _ _ => True⟩\ntheorem t : (5 : Nat) ≤ 3 := True.intro": (
        "@LE.le Nat «Prop» 5 3"
    ),
    # So is an imported one that is not found by default.
    "theorem t [i : LE Nat] (h : @LE.le Nat instLENat 5 3) : "
    "@LE.le Nat i 5 3 ∨ True := .inr trivial": (
        "∀ [i : LE Nat], @LE.le Nat instLENat 5 3 → 5 ≤ 3 ∨ True"
    ),
    "theorem t {α} [i : LE α] [j : LE α] (a : α) (h : @LE.le α i a a) : "
    "a ≤ a ∨ True := .inr trivial": (
        "∀ {α : Type u_1} [i : LE α] [j : LE α] (a : α), @LE.le α i a a → a ≤ a ∨ True"
    ),
    # Lean takes each variable whose type is a class, whatever its brackets.
    "theorem t (i : LE Nat) (h : i = i) : @LE.le Nat instLENat 3 5 := by decide": (
        "∀ (i : LE Nat), i = i → @LE.le Nat instLENat 3 5"
    ),
    "theorem t : let i : LE Nat := ⟨fun _ _ => True⟩; i = i ∧ @LE.le Nat instLENat 3 5 := "
    "⟨rfl, by decide⟩": (
        "have i : LE Nat := LE.mk fun (x x_1 : Nat) => True;\ni = i ∧ @LE.le Nat instLENat 3 5"
    ),
    "theorem t (i : (α : Type) → LE α) (h : i = i) : @LE.le Nat instLENat 3 5 := by decide": (
        "∀ (i : (α : Type) → LE α), i = i → @LE.le Nat instLENat 3 5"
    ),
    "abbrev Plus := Add Nat\ntheorem t [i : Plus] (h : i = i) : "
    "@HAdd.hAdd Nat Nat Nat (@instHAdd Nat instAddNat) 2 2 = 4 := rfl": (
        "∀ [i : Plus], i = i → @HAdd.hAdd Nat Nat Nat (@instHAdd Nat instAddNat) 2 2 = 4"
    ),
    "class Plus (α : Type) extends Add α\ntheorem t [i : Plus Nat] (h : i = i) : "
    "@HAdd.hAdd Nat Nat Nat (@instHAdd Nat instAddNat) 2 2 = 4 := rfl": (
        "∀ [i : Plus Nat], i = i → 2 + 2 = 4"  # Lean tries the library's instance first
    ),
    "class Plus (α : Type) extends Add α\n"
    "theorem t {α : Type} [i : Plus α] (a : α) (h : a = a) : 2 + 2 = 4 := rfl": (
        "∀ {α : Type} [i : Plus α] (a : α), a = a → 2 + 2 = 4"
    ),
    # Numbers have types, unless they are natural.
    "theorem t (x : Int) (h : x = 3) : x + 2 = 5 := by omega": (
        "∀ (x : Int), x = (3 : Int) → x + (2 : Int) = (5 : Int)"
    ),
    # What cannot be told is said.
    "theorem t : ([] : List Nat) = [] := rfl": "([] : List Nat) = []",
    "theorem t : ∃ x : Int, x = x := ⟨0, rfl⟩": "∃ (x : Int), x = x",
    "theorem t (f : {n : Nat} → Prop) (h : @f 3) : @f 3 := h": (
        "∀ (f : {n : Nat} → Prop), @f 3 → @f 3"
    ),
    "def Hides := {n : Nat} → Prop\ndef hides : Hides := fun {n} => n = n\n"
    "theorem t : @hides 3 := rfl": "@hides 3",
    "def F.{w} : Prop := ∀ α : Type w, α = α\ntheorem t : F.{3} := fun _ => rfl": "F.{3}",
    "theorem t : (⟨1, by decide⟩ : Fin 2) + ⟨1, by decide⟩ = ⟨0, by decide⟩ := rfl": (
        "((Fin.mk 1 ⋯ : Fin 2) + (Fin.mk 1 ⋯ : Fin 2) : Fin 2) = Fin.mk 0 ⋯"
    ),
    "theorem t (x y : Fin 5) (h : x.val = y.val) : x = y := Fin.ext h": (
        "∀ (x y : Fin 5), (↑x : Nat) = (↑y : Nat) → x = y"
    ),
    # A variable of one type may stand where another one is asked for.
    "open Lean.Order in\ntheorem t (p q : Prop) (h : p → q) : "
    "@PartialOrder.rel ReverseImplicationOrder _ q p := h": (
        "∀ (p q : Prop),\n  (p → q) →\n    @Lean.Order.PartialOrder.rel "
        "Lean.Order.ReverseImplicationOrder\n      "
        "Lean.Order.ReverseImplicationOrder.instOrder q p"
    ),
    "def K (_ : Nat) : Type := Nat\ndef f {n : Nat} (_ : K n) : Nat := n\n"
    "theorem t : @f 7 (3 : Nat) = 7 := rfl": "@f 7 (3 : Nat) = 7",
    # A proof is not printed, so it tells nothing.
    "def b {n : Nat} (_ : Nat → n = n) : Nat := n\n"
    "theorem t (h : 3 = 3) : @b 3 (fun _ => h) = 3 := rfl": "∀ (h : 3 = 3), @b 3 ⋯ = 3",
    # An instance may be an argument of what a function returns.
    "instance u : Add Nat := ⟨fun _ _ => 5⟩\n"
    "theorem t : id (fun [Add Nat] => (2 + 2 : Nat)) = 5 := rfl": (
        "@id ([Add Nat] → Nat) (fun [Add Nat] => 2 + 2) u = 5"
    ),
    "abbrev Plus := Add Nat\ntheorem t [i : Plus] : 2 + 2 = 2 + 2 := rfl": (
        "∀ [i : Plus],\n  @HAdd.hAdd Nat Nat Nat (@instHAdd Nat i) 2 2 = "
        "@HAdd.hAdd Nat Nat Nat (@instHAdd Nat i) 2 2"
    ),
    # Letters that turn the line round, or that cannot be seen, are not printed.
    "theorem t («a\u202eb» : Nat) : «a\u202eb» = «a\u202eb» := rfl": "",
    'theorem t : "a\u200bb" ≠ "ab" := by decide': "",
    'theorem t : "a\ufe0f" ≠ "a" := by decide': "",
    'theorem t : "\u3164" ≠ "" := by decide': "",
    'theorem t : "\u2800" ≠ " " := by decide': "",
    # The rest is as Lean prints it.
    "theorem t (xs : Array Nat) (h : 2 < xs.size) : xs[1]'(by omega) = xs[1]'(by omega) := rfl": (
        "∀ (xs : Array Nat) (h : 2 < xs.size), xs[1] = xs[1]"
    ),
    "structure Tree where\n  n : Nat\ndef Tree.m (t : Tree) : Tree := t\n"
    "theorem t (x y : Tree) (h : x = y) : x.m = y.m := h ▸ rfl": (
        "∀ (x y : Tree), x = y → Tree.m x = Tree.m y"
    ),
    'theorem t (s : String) (l : List Nat) : s ++ "" = s ∧ l.length ≥ 0 := by simp': (
        '∀ (s : String) (l : List Nat), s ++ "" = s ∧ l.length ≥ 0'
    ),
}


async def test_theorems_are_printed_readably_and_whole(real_site: Site) -> None:
    driver = await real_site.driver()
    for code, statement in STATED.items():
        reply = await driver.run(check(f"import Init\n{code}\n"))
        assert reply.verdict == "accepted", (code, reply.messages)
        [theorem] = [each for each in reply.theorems if each.name == "t"]
        assert theorem.statement == statement


MADE = """import Init
def fib : Nat → Nat
  | 0 => 0
  | 1 => 1
  | n + 2 => fib n + fib (n + 1)
theorem zero : fib 0 = 0 := by simp [fib]
@[ext] structure P where
  x : Nat
class C (α : Type) where
  op : α → α
  law : ∀ a, op (op a) = a
private theorem hidden : True := trivial
theorem ind (n : Nat) : fib n = fib n := by fun_induction fib n <;> rfl
@[ext] theorem also (p q : P) (h : p.x = q.x) : p = q := by cases p; cases q; simp_all
theorem first (α : Type) [C α] (a : α) : C.op (C.op a) = a := C.law a
mutual
theorem m1 : True := trivial
theorem m2 : True := trivial
end
"""


async def test_theorems_are_those_that_the_text_states_in_its_order(real_site: Site) -> None:
    reply = await (await real_site.driver()).run(check(MADE))
    assert reply.verdict == "accepted", reply.messages
    names = [theorem.name.split(".")[-1] for theorem in reply.theorems]
    assert names == ["zero", "hidden", "ind", "also", "first", "m1", "m2"]


async def test_an_axiom_behind_a_lemma_of_leans_own_still_counts(real_site: Site) -> None:
    code = (
        "import Init\n@[ext] structure P where\n  x : Nat\naxiom cheat : False\n"
        "class C where\n  law : 1 = 2\ntheorem t : True := where_ where\n  where_ : True := "
        "cheat.elim\n"
    )
    reply = await (await real_site.driver()).run(check(code))
    assert (reply.verdict, reply.reason) == ("rejected", "forbidden_axiom")


@pytest.mark.timeout(1800)
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(st.lists(OF_A_LIBRARY, min_size=19, max_size=19))
def test_what_is_printed_means_what_is_stated(
    real: Environment, tmp_path_factory: pytest.TempPathFactory, propositions: list[str]
) -> None:
    lean = Lean(real, tmp_path_factory.mktemp("lean"))
    asyncio.run(check_what_is_printed(lean, f"import Init\n{FEW}", propositions))
