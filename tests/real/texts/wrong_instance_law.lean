class Monoid' (α : Type) where
  one : α
  mul : α → α → α
  one_mul : ∀ a, mul one a = a

instance : Monoid' Nat where
  one := 0
  mul := Nat.mul
  one_mul := by intro a; exact Nat.zero_mul a

-- rejected lean_error
