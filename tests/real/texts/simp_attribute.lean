def double (n : Nat) : Nat := n + n

@[simp] theorem double_zero : double 0 = 0 := rfl

@[simp] theorem double_succ (n : Nat) : double (n + 1) = double n + 2 := by
  simp only [double]
  omega

theorem double_two : double 2 = 4 := by simp

-- accepted
-- states: double_zero, double_succ, double_two
