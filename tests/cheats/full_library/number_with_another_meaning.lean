import Lean
instance : OfNat Nat 100 := ⟨7⟩
theorem t (n : Nat) : n + 0 = n := by simp (maxSteps := 100)
