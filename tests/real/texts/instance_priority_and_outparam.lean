class Convert (α : Type) (β : outParam Type) where
  convert : α → β

instance : Convert Nat Int := ⟨Int.ofNat⟩

instance (priority := low) : Convert Bool Nat := ⟨Bool.toNat⟩

theorem converts : Convert.convert true = 1 := rfl

-- accepted
-- states: converts
