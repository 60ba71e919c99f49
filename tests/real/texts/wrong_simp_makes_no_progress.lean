theorem stuck (p q : Prop) (h : p → q) : q := by
  simp

-- rejected lean_error
