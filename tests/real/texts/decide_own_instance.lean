inductive Colour where
  | grey (level : Nat)
  | mixed (red green : Nat)
  deriving DecidableEq, Repr

theorem distinct : Colour.grey 1 ≠ Colour.mixed 1 1 := by decide

theorem levels : Colour.mixed 1 2 = Colour.mixed 1 2 ∧ Colour.grey 1 ≠ Colour.grey 2 := by decide

-- accepted
-- states: distinct, levels
