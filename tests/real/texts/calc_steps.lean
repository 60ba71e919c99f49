theorem calc_chain (a b c d : Nat) (h₁ : a = b) (h₂ : b ≤ c) (h₃ : c < d) : a < d := by
  calc a = b := h₁
    _ ≤ c := h₂
    _ < d := h₃

theorem calc_rewrite (a b : Nat) : (a + b) * 2 = b * 2 + a * 2 :=
  calc (a + b) * 2
    _ = a * 2 + b * 2 := Nat.add_mul a b 2
    _ = b * 2 + a * 2 := Nat.add_comm _ _

-- accepted
-- states: calc_chain, calc_rewrite
