theorem zero_add' (n : Nat) : 0 + n = n := by
  induction n
  case zero => rfl
  case succ n ih => rw [← Nat.add_assoc, ih]

-- accepted
-- states: zero_add'
