theorem conv_at_hypothesis (a b c : Nat) (h : a + b = c) : b + a = c := by
  conv at h =>
    lhs
    rw [Nat.add_comm]
  exact h

-- accepted
-- states: conv_at_hypothesis
