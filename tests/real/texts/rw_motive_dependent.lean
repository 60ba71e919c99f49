theorem cast_vector (n m : Nat) (h : n = m) (x : Fin n) : (h ▸ x : Fin m).val = x.val := by
  subst h
  rfl

-- accepted
-- states: cast_vector
