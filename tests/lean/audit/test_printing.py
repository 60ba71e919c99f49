"""What a text's theorems state: in Lean's words, by the header's notation alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.lean.images import Lean
from support.lean.statements import OWN, PROPOSITIONS, UNUSED, check_what_is_printed

from leanq.lean.audit.judge_client import Judgement, Judges
from leanq.lean.audit.olean import read_parts
from leanq.lean.environment import Environment
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.syntax import split_header

PRELUDE = "prelude\nimport Core\n"
# What Lean reads as the library's order, whatever instances a text has.
LIBRARYS = "@LE.le Nat instLENat n n"
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


async def test_levels_that_no_argument_tells_are_shown(judges: Judges, lean: Lean) -> None:
    code = f"""{PRELUDE}
def Of.{{u, v}} (α : Sort (max (max 1 u) v)) : Prop := True
theorem a : Of.{{1, 0}} Nat := True.intro
theorem b : Of.{{0, 1}} Nat := True.intro
"""
    assert await stated(judges, lean, code) == {"a": "Of.{1, 0} Nat", "b": "Of.{0, 1} Nat"}


@pytest.mark.slow
async def test_what_the_text_puts_behind_notation_is_shown(judges: Judges, lean: Lean) -> None:
    for binder in ("n", "always"):
        code = f"""{PRELUDE}
instance always : LE Nat := ⟨fun _ _ => True⟩
theorem t ({binder} : Nat) : {binder} ≤ 3 := True.intro
"""
        statement = (await stated(judges, lean, code))["t"]
        # Where a variable has the name, Lean says whose name it is.
        instance = "always" if binder == "n" else "_root_.always"
        assert f"@LE.le Nat {instance} {binder} " in statement
    code = f"""{PRELUDE}
@[instance_reducible] def five : OfNat Nat (nat_lit 5) := ⟨3⟩
theorem t : "five" = "five" → @OfNat.ofNat Nat (nat_lit 5) five = 3 := fun _ => rfl
"""
    assert "@OfNat.ofNat Nat (nat_lit 5) five" in (await stated(judges, lean, code))["t"]


@pytest.mark.slow
@pytest.mark.parametrize("variable", UNUSED)
async def test_an_instance_beside_a_variable_is_shown(
    judges: Judges, lean: Lean, variable: str
) -> None:
    """Lean finds the variable where the text names the library's instance."""
    code = f"""{PRELUDE}{OWN}
theorem t (h : False) : ∀ {variable.format("Nat")}, @LE.le Nat instLENat 2 3 := h.elim
theorem u (h : False) : ∀ {variable.format("W")} (p : Prop), p ∧ p → p := h.elim
"""
    found = await stated(judges, lean, code)
    assert "@LE.le Nat instLENat " in found["t"]
    assert found["u"].endswith("p ∧ p → p")


async def test_variables_that_change_no_instance_leave_the_notation(
    judges: Judges, lean: Lean
) -> None:
    code = f"""{PRELUDE}
def twice {{α : Type}} [Add α] (a : α) : α := a + a
class Has (α : Type) where
  one : α
theorem t {{α : Type}} [LE α] [Add α] [Has α] (a b : α) : a ≤ twice b + Has.one →
  a ≤ twice b + Has.one := fun h => h
theorem u (w : Add Nat) (n : Nat) : n ≤ n := Nat.le_refl n
"""
    found = await stated(judges, lean, code)
    sum_ = "a ≤ twice b + (Has.one : α)"
    assert found["t"].endswith(f"{sum_} → {sum_}")
    assert found["u"] == "∀ (w : Add Nat) (n : Nat), n ≤ n"


async def test_a_number_is_shown_where_the_texts_default_is_another(
    judges: Judges, lean: Lean
) -> None:
    code = f"""{PRELUDE}
structure W where
  n : Nat
@[default_instance 2000] instance made (n : Nat) : OfNat W n := ⟨⟨n⟩⟩
theorem t : (2 : Nat) = 2 := rfl
"""
    assert (await stated(judges, lean, code))["t"].startswith("@OfNat.ofNat Nat (nat_lit 2)")


async def test_a_text_whose_instances_come_first_is_read_with_them(
    judges: Judges, lean: Lean
) -> None:
    code = f"""{PRELUDE}
instance (priority := 50) last : LE Nat := ⟨fun _ _ => True⟩
theorem before (n : Nat) : n ≤ n := Nat.le_refl n
"""
    assert (await stated(judges, lean, code))["before"] == "∀ (n : Nat), n ≤ n"
    shown = await stated(judges, lean, code.replace("50", "2000").replace("n ≤ n", LIBRARYS))
    assert "@LE.le Nat instLENat n n" in shown["before"]


async def test_private_and_scoped_instances_are_read_as_others(judges: Judges, lean: Lean) -> None:
    code = f"""{PRELUDE}
private instance (priority := 50) last : LE Nat := ⟨fun _ _ => True⟩
theorem before (n : Nat) : n ≤ n := Nat.le_refl n
theorem own (n : Nat) : @LE.le Nat last n 0 := True.intro
namespace N
scoped instance (priority := 50) : LE Nat := ⟨fun _ _ => True⟩
end N
"""
    found = await stated(judges, lean, code)
    assert found["before"] == "∀ (n : Nat), n ≤ n"
    assert "@LE.le Nat last n 0" in found["own"]
    shown = await stated(judges, lean, code.replace("50", "2000").replace("n ≤ n", LIBRARYS))
    assert "@LE.le Nat instLENat n n" in shown["before"]


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(st.lists(PROPOSITIONS, min_size=20, max_size=20))
def test_what_is_printed_means_what_is_stated(lean: Lean, propositions: list[str]) -> None:
    asyncio.run(check_what_is_printed(lean, PRELUDE, propositions))
