theorem add_one_le (a b : Nat) (h : a < b) : a + 1 ≤ b := by omega

theorem between (a b c : Nat) (h₁ : a ≤ b) (h₂ : b ≤ c) (h₃ : c ≤ a) : a = b ∧ b = c := by
  constructor <;> omega

-- accepted
-- states: add_one_le, between
