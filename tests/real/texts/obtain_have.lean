theorem obtain_witness (p : Nat → Prop) (h : ∃ n, p n ∧ n < 5) : ∃ n, n < 5 := by
  obtain ⟨n, _, hn⟩ := h
  have : n < 5 := hn
  exact ⟨n, this⟩

-- accepted
-- states: obtain_witness
