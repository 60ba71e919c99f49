"""What theorems state, printed on a full library."""

from __future__ import annotations

from support.lean.sites import Site, check

STATED = {
    # Nothing of the text stands in an argument that notation leaves out.
    "theorem t (x : Int) (h : x = 3) : x + 2 = 5 := by omega": "∀ (x : Int), x = 3 → x + 2 = 5",
    "theorem t : ∃ x : Int, x = x := ⟨0, rfl⟩": "∃ (x : Int), x = x",
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
    # An instance of the text's own is shown.
    "instance «Prop» : LE Nat := ⟨fun _ _ => True⟩\ntheorem t (n : Nat) : n ≤ n := True.intro": (
        "∀ (n : Nat), @LE.le Nat «Prop» n n"
    ),
    # Letters that turn the line round, or that cannot be seen, are not printed.
    "theorem t («a\u202eb» : Nat) : «a\u202eb» = «a\u202eb» := rfl": "",
    'theorem t : "a\u200bb" ≠ "ab" := by decide': "",
    'theorem t : "a\ufe0f" ≠ "a" := by decide': "",
    'theorem t : "\u3164" ≠ "" := by decide': "",
    'theorem t : "\u2800" ≠ " " := by decide': "",
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
