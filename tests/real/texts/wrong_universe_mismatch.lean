def bad : Type 0 := Type 1

-- rejected lean_error
