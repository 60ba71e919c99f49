theorem syntax_error (n : Nat) : n = n := by
  exact rfl)

-- rejected lean_error
