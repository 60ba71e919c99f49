structure Age where
  years : Nat

instance : LE Age := ⟨fun a b => a.years ≤ b.years⟩

theorem age_refl (a : Age) : a ≤ a := Nat.le_refl a.years

theorem age_trans (a b c : Age) (h : a ≤ b) (k : b ≤ c) : a ≤ c := Nat.le_trans h k

-- accepted
-- states: age_refl, age_trans
