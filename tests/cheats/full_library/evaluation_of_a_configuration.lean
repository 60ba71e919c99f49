import Lean
def f : Lean.Meta.Simp.Config := { decide := true }
theorem t (n : Nat) : n + 0 = n := by simp (config := f)
