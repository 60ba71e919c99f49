theorem swap (p q : Prop) : p ∧ q ↔ q ∧ p := by
  simp only [and_comm]

theorem assoc (a b c : Nat) : a + (b + c) = c + a + b := by
  simp only [Nat.add_comm, Nat.add_left_comm]

-- accepted
-- states: swap, assoc
