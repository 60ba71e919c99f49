theorem double_negation (p : Prop) (h : ¬ ¬ p) : p := by
  apply Classical.byContradiction
  intro hp
  exact h hp

theorem excluded (p : Prop) : p ∨ ¬ p := Classical.em p

-- accepted
-- states: double_negation, excluded
