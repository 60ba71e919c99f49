theorem poly.{u} (α : Sort u) (a b : α) (h : a = b) : b = a := h.symm

theorem at_two_levels : (poly Nat 1 1 rfl = rfl) ∧ (poly Type Nat Nat rfl = rfl) := ⟨rfl, rfl⟩

-- accepted
-- states: poly, at_two_levels
