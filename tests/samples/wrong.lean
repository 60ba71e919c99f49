-- Rejected: the two halves come in the wrong order.
prelude
import Core
theorem and_swap (p q : Prop) : And p q → And q p := by
  intro h
  constructor
  exact h.left
  exact h.right
