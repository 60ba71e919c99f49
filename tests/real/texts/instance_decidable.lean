def Small (n : Nat) : Prop := n < 10

instance (n : Nat) : Decidable (Small n) := inferInstanceAs (Decidable (n < 10))

theorem three_is_small : Small 3 := by decide

theorem twelve_is_not_small : ¬ Small 12 := by decide

-- accepted
-- states: three_is_small, twelve_is_not_small
