example (a b : Nat) (h : a ≤ b) : a < b + 1 := by omega

example : ∃ n : Nat, n > 3 := ⟨4, by decide⟩

-- accepted
