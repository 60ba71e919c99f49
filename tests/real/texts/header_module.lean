module

theorem in_a_module (a b : Nat) (h : a < b) : a + 1 ≤ b := by omega

-- accepted
-- states: in_a_module
