theorem id_comp_id : (id ∘ id : Nat → Nat) = id := by
  funext n
  simp

theorem const_map (xs : List Nat) : (xs.map fun _ => 0).sum = 0 := by
  induction xs with
  | nil => simp
  | cons x xs ih => simp [ih]

-- accepted
-- states: id_comp_id, const_map
