import Std

theorem cast_sum (a b : Nat) : ((a + b : Nat) : Int) = (a : Int) + (b : Int) := by
  push_cast
  rfl

-- accepted
-- states: cast_sum
