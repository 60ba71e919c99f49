theorem wrong_side (p q : Prop) (h : p ∨ q) : p := by
  cases h with
  | inl hp => exact hp
  | inr hq => exact hq

-- rejected lean_error
