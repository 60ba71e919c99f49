prelude
import Bare
noncomputable def Nat.add (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.add n m) 0 := Eq.refl 0
attribute [irreducible] Nat.add
theorem computed : Eq (Nat.add 0 1) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 0 1))
