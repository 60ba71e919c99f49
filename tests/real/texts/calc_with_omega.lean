import Std

theorem calc_bounds (x y : Nat) (h : x ≤ 3) (k : y ≤ 4) : x + y < 8 := by
  calc
    x + y ≤ 3 + y := by omega
    _ ≤ 3 + 4 := by omega
    _ < 8 := by decide

-- accepted
-- states: calc_bounds
