theorem remains (a b c : Nat) (h : a = b) (k : b = c) : a = c := by
  rw [h]

-- rejected lean_error
