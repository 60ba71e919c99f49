local instance (priority := high) : LT Nat := ⟨fun _ _ => True⟩
theorem t : 5 < 3 := trivial
