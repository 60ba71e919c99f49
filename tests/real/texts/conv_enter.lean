theorem conv_enter (f : Nat → Nat → Nat) (a b : Nat) : f (a + b) (a * b) = f (b + a) (a * b) := by
  conv in a + b => rw [Nat.add_comm]

-- accepted
-- states: conv_enter
