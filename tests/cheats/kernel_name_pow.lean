prelude
import Bare
noncomputable def Nat.pow (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.pow n m) 0 := Eq.refl 0
attribute [irreducible] Nat.pow
theorem computed : Eq (Nat.pow 2 0) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 2 0))
