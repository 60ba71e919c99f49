def pow2 : Nat → Nat
  | 0 => 1
  | n + 1 => pow2 n + pow2 n

theorem pow2_pos (n : Nat) : 0 < pow2 n := by
  induction n with
  | zero => decide
  | succ n ih => sorry

-- incomplete sorry
-- states: pow2_pos
