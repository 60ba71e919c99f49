theorem second_only (a b : Nat) (h : a = b) : a + a = a + b := by
  conv => rhs; rw [← h]

-- accepted
-- states: second_only
