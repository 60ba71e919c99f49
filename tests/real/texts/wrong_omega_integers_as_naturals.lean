theorem sub_add (a b : Nat) : a - b + b = a := by omega

-- rejected lean_error
