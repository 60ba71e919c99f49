theorem from_sum (a b : Nat) (h : a + 0 = b + 0) : a = b := by
  simp at h
  exact h

theorem from_membership (x : Nat) (h : x ∈ [1, 2]) : x = 1 ∨ x = 2 := by
  simp at h
  exact h

-- accepted
-- states: from_sum, from_membership
