"""Where tactics begin, by layout."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leanq.lean.run.documents import tactic_places

TEXT = """theorem a : p ∧ q := by
  have h : p := by
    exact
      hp
  -- by a comment
  refine ⟨?_, ?_⟩ <;> exact h
theorem b : n = n := by
  induction n with
  | zero => rfl
  | succ n ih =>
    constructor; rfl
  · done
def f := fun x => x
"""


def test_the_places_of_a_text() -> None:
    lines = TEXT.split("\n")
    found = [lines[line - 1][column:].split()[0] for line, column in tactic_places(TEXT)]
    assert found == [
        *("have", "exact", "refine", "exact", "induction", "rfl", "constructor;", "rfl", "done")
    ]


@given(
    st.lists(st.sampled_from([*"\n ·;|<>=(", "by", "  ", "=>", "simp", "case", '"']), max_size=60)
)
def test_any_text_has_places_within_it(parts: list[str]) -> None:
    text = "".join(parts)
    lines = text.split("\n")
    places = tactic_places(text)
    assert places == sorted(set(places))
    assert all(column < len(lines[line - 1]) for line, column in places)
