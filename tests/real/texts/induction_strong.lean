theorem has_divisor_two_or_odd (n : Nat) : ∃ k r, n = 2 * k + r ∧ r < 2 := by
  induction n using Nat.strongRecOn with
  | ind n ih =>
    by_cases h : n < 2
    · exact ⟨0, n, by omega, h⟩
    · have ⟨k, r, hk, hr⟩ := ih (n - 2) (by omega)
      exact ⟨k + 1, r, by omega, hr⟩

-- accepted
-- states: has_divisor_two_or_odd
