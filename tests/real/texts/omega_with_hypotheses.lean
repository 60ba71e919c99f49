import Std

theorem sum_of_three (a b c : Nat) (h : a + b + c = 10) (ha : a = 2 * b) (hc : c = b + 2) : b = 2 := by
  subst ha hc
  omega

-- accepted
-- states: sum_of_three
