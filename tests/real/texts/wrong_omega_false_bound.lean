theorem off_by_one (a b : Nat) (h : a < b) : a + 2 ≤ b := by omega

-- rejected lean_error
