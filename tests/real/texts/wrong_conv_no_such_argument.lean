theorem conv_wrong (a b : Nat) : a + b = b + a := by
  conv =>
    lhs
    arg 7
    rw [Nat.add_comm]

-- rejected lean_error
