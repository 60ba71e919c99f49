theorem mismatch (a b : Nat) (h : a ≤ b) : b ≤ a := by exact h

-- rejected lean_error
