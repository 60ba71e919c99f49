theorem conv_left (a b : Nat) : 0 + a + b = b + a := by
  conv =>
    lhs
    rw [Nat.zero_add]
  sorry

-- incomplete sorry
-- states: conv_left
