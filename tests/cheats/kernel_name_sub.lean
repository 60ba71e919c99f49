prelude
import Bare
noncomputable def Nat.sub (_n _m : Nat) : Nat := 1
theorem defined (n m : Nat) : Eq (Nat.sub n m) 1 := Eq.refl 1
attribute [irreducible] Nat.sub
theorem computed : Eq (Nat.sub 1 1) 0 := Eq.refl 0
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm (defined 1 1)) computed)
