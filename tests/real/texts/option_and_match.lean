def safeDiv (a b : Nat) : Option Nat := if b = 0 then none else some (a / b)

theorem safeDiv_zero (a : Nat) : safeDiv a 0 = none := rfl

theorem safeDiv_some (a b : Nat) (h : b ≠ 0) : ∃ c, safeDiv a b = some c := by
  simp [safeDiv, h]

-- accepted
-- states: safeDiv_zero, safeDiv_some
