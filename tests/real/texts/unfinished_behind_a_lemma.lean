theorem helper (n : Nat) : n < n + 2 := sorry

theorem user (n : Nat) : n < n + 3 := Nat.lt_trans (helper n) (by omega)

-- incomplete sorry
-- states: helper, user
