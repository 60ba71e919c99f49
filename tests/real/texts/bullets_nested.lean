theorem nested (p q r s : Prop) (hp : p) (hq : q) (hr : r) (hs : s) : (p ∧ q) ∧ (r ∧ s) := by
  constructor
  · constructor
    · exact hp
    · exact hq
  · constructor
    · exact hr
    · exact hs

-- accepted
-- states: nested
