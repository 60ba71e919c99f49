theorem nothing_found (f : Nat → Nat) (a b : Nat) (h : f a = f b) : a = b := by exact?

-- rejected lean_error
