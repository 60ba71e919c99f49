inductive Shape where
  | circle (radius : Nat)
  | rectangle (width height : Nat)
  deriving Repr, BEq, DecidableEq, Inhabited, Hashable, Ord

theorem shapes_differ : Shape.circle 1 ≠ Shape.rectangle 1 1 := by decide

theorem beq_self : (Shape.circle 3 == Shape.circle 3) = true := by decide

-- accepted
-- states: shapes_differ, beq_self
