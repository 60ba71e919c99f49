class Magma (α : Type) where
  op : α → α → α
  comm : ∀ a b, op a b = op b a

instance : Magma Nat where
  op := Nat.add
  comm := sorry

theorem by_instance (a b : Nat) : Magma.op a b = Magma.op b a := Magma.comm a b

-- incomplete sorry
-- states: by_instance
