"""Modules that somebody may have meant by an unknown name."""

from __future__ import annotations

import time

import pytest

from leanq.lean.run.files import nearest

MODULES = [
    *("Mathlib", "Mathlib.Foo.Bar", "Mathlib.Foo.Baz", "Mathlib.Foo.Quux", "Mathlib.Foo"),
    *("Mathlib.Data.Nat.Prime.Basic", "Mathlib.Data.Nat.Prime.Defs", "Mathlib.Tactic.Ring"),
    *("Mathlib.Algebra.Group.Basic", "Mathlib.Algebra.Ring.Basic", "Batteries.Data.List"),
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Mathlib.Foo.Br", "Mathlib.Foo.Bar"),
        ("Mathlib.Fo.Bar", "Mathlib.Foo.Bar"),
        ("Mathlb.Foo.Bar", "Mathlib.Foo.Bar"),
        ("mathlib", "Mathlib"),
        ("Mathlib.Tactics.Ring", "Mathlib.Tactic.Ring"),
        ("Mathlib.Data.Nat.Prime", "Mathlib.Data.Nat.Prime.Basic"),
        ("Mathlib.Data.List", "Batteries.Data.List"),
        ("Mathlib.Algebr.Group.Basic", "Mathlib.Algebra.Group.Basic"),
        ("Wholly.Different", ""),
        ("Mathlib." + "x" * 100_000, ""),
        ("Mathlib" + ".x" * 10_000, ""),
    ],
)
def test_the_nearest_comes_first(name: str, found: str) -> None:
    made = [".".join(each) for each in nearest(name.split("."), (m.split(".") for m in MODULES))]
    assert len(made) <= 3
    assert (made or [""])[0] == found


def test_many_modules_of_one_last_part_are_not_all_compared() -> None:
    names = [("Mathlib", f"Part{n}", f"More{n % 7}", "Basic") for n in range(10_000)]
    began_s = time.process_time()
    assert nearest(("Mathlib", "Part77", "Moore0", "Basic"), names)[0] == names[77]
    assert time.process_time() - began_s < 5.0
