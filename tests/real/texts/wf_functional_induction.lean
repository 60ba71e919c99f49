def halve (n : Nat) : Nat :=
  if n < 2 then 0 else halve (n - 2) + 1
termination_by n

theorem halve_le (n : Nat) : halve n ≤ n := by
  induction n using halve.induct with
  | case1 n h => rw [halve]; simp [h]
  | case2 n h ih => rw [halve]; simp [h]; omega

-- accepted
-- states: halve_le
