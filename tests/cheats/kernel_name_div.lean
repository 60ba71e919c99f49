prelude
import Bare
noncomputable def Nat.div (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.div n m) 0 := Eq.refl 0
attribute [irreducible] Nat.div
theorem computed : Eq (Nat.div 2 2) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 2 2))
