prelude
import Bare
noncomputable def Nat.land (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.land n m) 0 := Eq.refl 0
attribute [irreducible] Nat.land
theorem computed : Eq (Nat.land 1 1) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 1 1))
