prelude
import Bare
noncomputable def Nat.shiftLeft (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.shiftLeft n m) 0 := Eq.refl 0
attribute [irreducible] Nat.shiftLeft
theorem computed : Eq (Nat.shiftLeft 1 0) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 1 0))
