def sign (n : Int) : Int := if n < 0 then -1 else if n = 0 then 0 else 1

theorem sign_of_negative (n : Int) (h : n < 0) : sign n = -1 := by
  unfold sign
  rw [if_pos h]

theorem sign_of_positive (n : Int) (h : 0 < n) : sign n = 1 := by
  unfold sign
  rw [if_neg (by omega), if_neg (by omega)]

-- accepted
-- states: sign_of_negative, sign_of_positive
