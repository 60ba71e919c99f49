def gcd' (m n : Nat) : Nat :=
  if h : m = 0 then n else gcd' (n % m) m
termination_by m
decreasing_by exact Nat.mod_lt _ (Nat.pos_of_ne_zero h)

theorem gcd'_zero (n : Nat) : gcd' 0 n = n := by
  rw [gcd']
  simp

-- accepted
-- states: gcd'_zero
