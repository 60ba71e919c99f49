theorem unsolved (p q : Prop) (hp : p) (h : p → q) : p ∧ q := by
  constructor
  · exact hp
  · apply h

-- rejected lean_error
