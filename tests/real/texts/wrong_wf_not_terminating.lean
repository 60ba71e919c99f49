def loop (n : Nat) : Nat := loop (n + 1) + 1

theorem loop_zero : loop 0 = loop 1 + 1 := rfl

-- rejected lean_error
