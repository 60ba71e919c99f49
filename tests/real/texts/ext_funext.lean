theorem pointwise (f : Nat → Nat) : (fun x => f x + 0) = f := by
  funext x
  rfl

theorem pairs (p q : Nat × Nat) (h₁ : p.1 = q.1) (h₂ : p.2 = q.2) : p = q := by
  ext
  · exact h₁
  · exact h₂

-- accepted
-- states: pointwise, pairs
