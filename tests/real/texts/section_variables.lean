section
variable (α : Type) (p q : α → Prop)

theorem forall_and' : (∀ x, p x ∧ q x) ↔ (∀ x, p x) ∧ (∀ x, q x) := by
  constructor
  · intro h
    exact ⟨fun x => (h x).1, fun x => (h x).2⟩
  · rintro ⟨h, k⟩ x
    exact ⟨h x, k x⟩

variable [Inhabited α]

theorem some_element : ∃ _ : α, True := ⟨default, trivial⟩
end

-- accepted
-- states: forall_and', some_element
