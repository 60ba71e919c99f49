theorem gap (a b c : Nat) (h : a = b) (k : c = 2) : a = c := by
  calc a = b := h
    _ = c := k

-- rejected lean_error
