theorem max_cases (a b : Nat) : max a b = a ∨ max a b = b := by
  by_cases h : a ≤ b
  · right
    exact Nat.max_eq_right h
  · left
    exact Nat.max_eq_left (by omega)

-- accepted
-- states: max_cases
