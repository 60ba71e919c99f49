theorem cancel (a b c : Nat) : a + c = b + c ↔ a = b := by
  simp

theorem le_itself (a b : Nat) : a ≤ a + b := by simp

-- accepted
-- states: cancel, le_itself
