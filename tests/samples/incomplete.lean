-- Incomplete: Lean accepts the file, with a warning about the sorry.
prelude
import Core
theorem and_swap (p q : Prop) : And p q → And q p := by
  intro h
  exact sorry
