-- Accepted: a complete proof by tactics.
prelude
import Core
theorem and_swap (p q : Prop) : And p q → And q p := by
  intro h
  constructor
  exact h.right
  exact h.left
