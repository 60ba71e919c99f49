prelude
import Core
structure Card where
  rank : Nat
def byRank : LE Card := ⟨fun a b => a.rank ≤ b.rank⟩
attribute [local instance] byRank
theorem t (a : Card) : a ≤ a := Nat.le_refl a.rank
