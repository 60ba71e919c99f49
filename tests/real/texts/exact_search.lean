theorem search (a b c : Nat) (h : a ≤ b) : a + c ≤ b + c := by exact?

-- accepted
-- states: search
