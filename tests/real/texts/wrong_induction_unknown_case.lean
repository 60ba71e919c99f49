theorem bad_case (n : Nat) : n = n := by
  induction n with
  | nil => rfl
  | succ n ih => rfl

-- rejected lean_error
