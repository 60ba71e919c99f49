theorem trichotomy (a b : Nat) : a < b ∨ a = b ∨ b < a := by
  rcases Nat.lt_or_ge a b with h | h
  · exact .inl h
  · rcases Nat.eq_or_lt_of_le h with k | k
    · exact .inr (.inl k.symm)
    · exact .inr (.inr (by sorry))

-- incomplete sorry
-- states: trichotomy
