module

theorem later (a b : Nat) : a * b = b * a := by sorry

-- incomplete sorry
-- states: later
