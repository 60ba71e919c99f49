theorem rewrite_hypothesis (a b c : Nat) (h : a = b) (k : b + c = 5) : a + c = 5 := by
  rw [← h] at k
  exact k

theorem rewrite_everywhere (a b : Nat) (h : a = b) (k : a = 3) : b = 3 := by
  rw [h] at k
  assumption

-- accepted
-- states: rewrite_hypothesis, rewrite_everywhere
