theorem from_context (a b : Nat) (h : a = b) : b = a := by exact?

-- accepted
-- states: from_context
