theorem twice (n : Nat) : n = n := rfl

theorem twice (n : Nat) : n = n := rfl

-- rejected lean_error
