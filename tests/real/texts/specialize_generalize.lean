theorem special (p : Nat → Prop) (h : ∀ n, p n) : p 7 := by
  specialize h 7
  exact h

theorem general (a b : Nat) : (a + b) * (a + b + 1) = (a + b + 1) * (a + b) := by
  generalize a + b = c
  exact Nat.mul_comm c (c + 1)

-- accepted
-- states: special, general
