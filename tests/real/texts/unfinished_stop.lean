theorem stopped (a b c : Nat) (h : a = b) : a + c = b + c := by
  stop
  rw [h]

-- incomplete sorry
-- states: stopped
