-- Rejected: a colon is missing, so it is no Lean.
prelude
import Core
theorem and_swap (p q : Prop) And p q → And q p := by
  intro h
