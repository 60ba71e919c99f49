theorem first_works (p q : Prop) (hp : p) (hq : q) : p ∧ q := by
  first
  | exact hp
  | exact ⟨hp, hq⟩

theorem try_continues (n : Nat) : n = n := by
  try contradiction
  rfl

-- accepted
-- states: first_works, try_continues
