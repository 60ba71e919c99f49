theorem unknown_tag (p q : Prop) (hp : p) (hq : q) : p ∧ q := by
  constructor
  case first => exact hp
  case second => exact hq

-- rejected lean_error
