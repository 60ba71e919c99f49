theorem clamp (a b : Nat) : min a b + max a b = a + b := by
  rcases Nat.le_total a b with h | h
  · rw [Nat.min_eq_left h, Nat.max_eq_right h]
  · rw [Nat.min_eq_right h, Nat.max_eq_left h, Nat.add_comm]

-- accepted
-- states: clamp
