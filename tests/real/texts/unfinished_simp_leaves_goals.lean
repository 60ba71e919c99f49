theorem min_le_both (a b : Nat) : min a b ≤ a ∧ min a b ≤ b := by
  constructor
  · exact Nat.min_le_left a b
  · skip
    sorry

-- incomplete sorry
-- states: min_le_both
