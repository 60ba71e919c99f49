theorem unfinished (a b c : Nat) (h : a ≤ b) : a ≤ b + c := by
  calc a ≤ b := h
    _ ≤ b + c := sorry

-- incomplete sorry
-- states: unfinished
