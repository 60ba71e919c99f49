import Std

theorem two_x_plus_one_ne (x y : Int) : 2 * x + 1 ≠ 2 * y := by omega

theorem abs_cases (x : Int) (h : x.natAbs = 3) : x = 3 ∨ x = -3 := by omega

-- accepted
-- states: two_x_plus_one_ne, abs_cases
