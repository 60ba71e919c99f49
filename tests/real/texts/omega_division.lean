theorem half_le (n : Nat) : n / 2 ≤ n := by omega

theorem mod_two (n : Nat) : n % 2 = 0 ∨ n % 2 = 1 := by omega

theorem div_mod_ten (n : Nat) : 10 * (n / 10) + n % 10 = n := by omega

-- accepted
-- states: half_le, mod_two, div_mod_ten
