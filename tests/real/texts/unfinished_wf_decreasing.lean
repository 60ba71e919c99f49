def shrink (n : Nat) : Nat :=
  if n = 0 then 0 else shrink (n / 3) + 1
termination_by n
decreasing_by sorry

theorem shrink_zero : shrink 0 = 0 := by
  rw [shrink]
  rfl

-- incomplete sorry
-- states: shrink_zero
