import Std

theorem with_lemma (a b : Nat) (h : a * b = 0) : a = 0 ∨ b = 0 := by
  have key : a = 0 ∨ b = 0 := sorry
  exact key

-- incomplete sorry
-- states: with_lemma
