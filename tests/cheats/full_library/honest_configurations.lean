import Lean
def f (order : Nat) : Nat := order
theorem s (k : Nat) : f (order := k) = k := rfl
theorem t (a b : Nat) (h : a = b) : a + a = a + b := by
  rw (occs := .pos [2]) [h]
theorem u (n : Nat) : n + 0 = n := by simp (maxSteps := 1000)
