theorem tags (n : Nat) (p : Nat → Prop) (h₀ : p 0) (h₁ : ∀ k, p k → p (k + 1)) : p n := by
  induction n
  case succ k ih => exact h₁ k ih
  case zero => exact h₀

-- accepted
-- states: tags
