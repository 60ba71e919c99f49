theorem one_case (n : Nat) : 0 ≤ n := by
  induction n with
  | zero => exact Nat.le_refl 0

-- rejected lean_error
