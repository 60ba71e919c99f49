-- Accepted: a proof by cases.
prelude
import Core
theorem or_swap (p q : Prop) (h : Or p q) : Or q p := by
  match h with
  | Or.inl hp => exact Or.inr hp
  | Or.inr hq => exact Or.inl hq
