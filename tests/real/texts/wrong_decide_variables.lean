theorem with_variables (n : Nat) : n + 1 ≠ 0 := by decide

-- rejected lean_error
