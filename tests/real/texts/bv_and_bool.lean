theorem bool_and (a b : Bool) : (a && b) = (b && a) := by
  cases a <;> cases b <;> rfl

theorem xor_self (b : Bool) : (b ^^ b) = false := by simp

-- accepted
-- states: bool_and, xor_self
