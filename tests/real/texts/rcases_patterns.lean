theorem unpack (p q r : Prop) (h : p ∧ (q ∨ r)) : (p ∧ q) ∨ (p ∧ r) := by
  rcases h with ⟨hp, hq | hr⟩
  · exact .inl ⟨hp, hq⟩
  · exact .inr ⟨hp, hr⟩

theorem exists_swap (α : Type) (p q : α → Prop) : (∃ x, p x ∧ q x) → ∃ x, q x ∧ p x := by
  rintro ⟨x, hp, hq⟩
  exact ⟨x, hq, hp⟩

-- accepted
-- states: unpack, exists_swap
