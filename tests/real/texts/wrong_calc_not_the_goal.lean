theorem not_the_goal (a b : Nat) (h : a < b) : a < b + 1 := by
  calc a < b := h
    _ = b := rfl

-- rejected lean_error
