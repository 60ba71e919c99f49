theorem no_successor (n : Nat) (h : n + 1 = 0) : False := by
  cases h

theorem cons_injective (x y : Nat) (xs ys : List Nat) (h : x :: xs = y :: ys) : x = y ∧ xs = ys := by
  injection h with h₁ h₂
  exact ⟨h₁, h₂⟩

-- accepted
-- states: no_successor, cons_injective
