theorem before (a : Nat) : a + 0 = a := rfl

example : before 3 = rfl := rfl

theorem after (a : Nat) : 0 + a = a := by simp

-- accepted
-- states: before, after
