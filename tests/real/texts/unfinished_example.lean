theorem proved : 1 + 1 = 2 := rfl

example (a b : Nat) : a * b = b * a := by sorry

-- incomplete sorry
-- states: proved
