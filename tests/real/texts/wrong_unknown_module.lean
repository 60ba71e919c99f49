import Mathlib.Tactic

theorem with_mathlib (a b : Nat) : a + b = b + a := by ring

-- rejected unknown_import
