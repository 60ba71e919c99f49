import Std

theorem square (a b : Nat) (h : a ≤ b) : a * a ≤ b * b := by omega

-- rejected lean_error
