theorem by_case_names (p q : Prop) : p ∧ q → q ∧ p := by
  intro h
  constructor
  case right => exact h.left
  case left => exact h.right

theorem with_next (p q : Prop) (hp : p) (hq : q) : p ∧ q := by
  constructor
  next => exact hp
  next => exact hq

-- accepted
-- states: by_case_names, with_next
