"""Texts that run programs, and their honest twins, on a full library."""

from __future__ import annotations

import pytest
from support.lean.libraries import Library
from support.lean.sites import Site, check

from leanq.lean.run.evaluators import scan
from leanq.lean.run.programs import FIELDS

HONEST = [
    "def f (order : Nat) := order\ntheorem t (k : Nat) : f (order := k) = k := rfl",
    "theorem t (a b : Nat) (h : a = b) : a + a = a + b := by rw (occs := .pos [2]) [h]",
    "theorem t (n : Nat) : n + 0 = n := by simp (maxSteps := 1000)",
    "theorem t (a b : Nat) (h : a = b) : a + a = a + b := by\n  rw (occs := [2]) [h]",
    "/-- No syntax, no macro. -/\n"
    "theorem t (n : Nat) : Equivalence (fun a b => a % n = b % n) where\n"
    "  refl := fun _ => rfl -- reflexivity\n"
    "  symm := fun h => h.symm\n"
    "  trans := fun h k => h.trans k",
    "theorem new' (a : Nat) : a = a := rfl\n"
    "@[deprecated new' (since := \"2025-01-01\")]\ntheorem old (a : Nat) : a = a := new' a",
    "inductive Foo.Syntax where | macros : Nat → Foo.Syntax\ntheorem unsafe_t : True := trivial",
]
# Lean 4.35 reduces these and runs nothing; others evaluate them.
COMPUTED = [
    "instance : OfNat Nat 100 := ⟨7⟩\ntheorem t (n : Nat) : n + 0 = n := by simp (maxSteps := 100)",
    "theorem t (n : Nat) : n + 0 = n := by simp (maxSteps := 50 + 50)",
    "def Lean.Meta.Occurrences.f : Lean.Meta.Occurrences := .all\n"
    "theorem t (n : Nat) : n + 0 = n := by rw (occs := .f) [Nat.add_zero]",
]


@pytest.mark.parametrize("text", HONEST)
async def test_a_literal_or_an_argument_runs_no_program(real_site: Site, text: str) -> None:
    reply = await (await real_site.driver()).run(check(f"import Lean\n{text}\n"))
    assert (reply.verdict, reply.reason) == ("accepted", None), reply.messages


@pytest.mark.parametrize("text", COMPUTED)
async def test_a_configuration_that_is_computed_counts_where_nobody_watches(
    real_site: Site, text: str
) -> None:
    code = f"import Lean\n{text}\n"
    reply = await (await real_site.driver(forks=None)).run(check(code))
    assert (reply.verdict, reply.reason) == ("unverified", "runs_programs"), reply.messages
    reply = await (await real_site.driver()).run(check(code))
    assert (reply.verdict, reply.reason) == ("accepted", None), reply.messages


def test_the_fields_of_all_configurations_are_known(library: Library) -> None:
    found = scan((library.folder,), leave_out=())
    # A file of the module system does not show what implements a function to all that import it.
    assert library.layout != "plain" or len(found.fields) > 100
    assert set(found.fields) <= FIELDS
