theorem no_pattern (a b : Nat) : a + b = b + a := by
  rw [Nat.mul_comm]

-- rejected lean_error
