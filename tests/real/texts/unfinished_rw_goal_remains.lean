theorem remains (a b c : Nat) (h : a = b) (k : b = c) : a = c := by
  rw [h]
  sorry

-- incomplete sorry
-- states: remains
