theorem ac_sum (a b c : Nat) : a + b + c = c + b + a := by ac_rfl

theorem ac_and (p q r : Prop) : (p ∧ q ∧ r) = (r ∧ q ∧ p) := by ac_rfl

-- accepted
-- states: ac_sum, ac_and
