class Shift (α : Type) where
  shift : α → α
  shift_ne : ∀ a, shift a ≠ a

instance : Shift Nat where
  shift n := n + 1
  shift_ne n := by omega

instance : Shift Bool where
  shift b := !b
  shift_ne b := by cases b <;> decide

theorem no_fixed_point [Shift α] (a : α) : Shift.shift a ≠ a := Shift.shift_ne a

-- accepted
-- states: no_fixed_point
