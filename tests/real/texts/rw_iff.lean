theorem through_iff (p q r : Prop) (h : p ↔ q) (k : q ↔ r) : p ↔ r := by
  rw [h, k]

theorem not_forall_false (p : Nat → Prop) : (¬ ∃ x, p x) ↔ ∀ x, ¬ p x := by
  rw [not_exists]

-- accepted
-- states: through_iff, not_forall_false
