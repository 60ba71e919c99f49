binder_predicate x " within " y:term => `($x < $y ∨ True)
theorem t : ∀ n within 3, n = n := fun _ _ => rfl
