prelude
import Bare
noncomputable def Nat.lor (_n _m : Nat) : Nat := 0
theorem defined (n m : Nat) : Eq (Nat.lor n m) 0 := Eq.refl 0
attribute [irreducible] Nat.lor
theorem computed : Eq (Nat.lor 1 0) 1 := Eq.refl 1
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm computed) (defined 1 0))
