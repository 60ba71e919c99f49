prelude
import Bare
noncomputable def Nat.gcd (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.gcd n m) 0 := Eq.refl 0
attribute [irreducible] Nat.gcd
theorem computed : Eq (Nat.gcd 2 3) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 2 3))
