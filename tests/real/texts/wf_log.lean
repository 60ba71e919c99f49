def log2' (n : Nat) : Nat :=
  if n ≤ 1 then 0 else log2' (n / 2) + 1
termination_by n
decreasing_by omega

theorem log2'_one : log2' 1 = 0 := by
  unfold log2'
  simp

-- accepted
-- states: log2'_one
