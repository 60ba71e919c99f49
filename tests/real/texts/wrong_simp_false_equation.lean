theorem reverse_eq (xs : List Nat) : xs.reverse = xs := by simp

-- rejected lean_error
