theorem level_mismatch.{u} (α : Type u) : ∃ β : Type, β = α := ⟨α, rfl⟩

-- rejected lean_error
