-- The twin of an instance that changes an order: one of a type of its own.
prelude
import Core
structure Card where
  rank : Nat
instance : LE Card := ⟨fun a b => a.rank ≤ b.rank⟩
theorem t (a : Card) : a ≤ a := Nat.le.refl
theorem s : 3 ≤ 5 := by decide
