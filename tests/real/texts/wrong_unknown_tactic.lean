theorem unknown_tactic (a b : Nat) : a + b = b + a := by
  ring

-- rejected lean_error
