def pred' (n : Nat) : Nat :=
  match n with
  | 0 => 0
  | n + 1 => n

theorem pred'_le (n : Nat) : pred' n ≤ n := by
  unfold pred'
  split
  · exact Nat.le_refl 0
  · omega

-- accepted
-- states: pred'_le
