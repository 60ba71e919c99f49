theorem swap_in_middle (a b c : Nat) : a + b + c = a + c + b := by
  rw [Nat.add_assoc, Nat.add_comm b c, ← Nat.add_assoc]

theorem under_hypothesis (f : Nat → Nat) (h : ∀ x, f x = x) : f (f 2) = 2 := by
  rw [h, h]

-- accepted
-- states: swap_in_middle, under_hypothesis
