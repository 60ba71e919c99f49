theorem second_missing (p q : Prop) (hp : p) (h : p → q) : p ∧ q := by
  constructor
  · exact hp
  · sorry

-- incomplete sorry
-- states: second_missing
