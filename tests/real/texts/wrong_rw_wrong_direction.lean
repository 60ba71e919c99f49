theorem wrong_direction (a b : Nat) (h : a = b) : b = a := by
  rw [h]
  exact h

-- rejected lean_error
