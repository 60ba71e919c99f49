prelude
import Bare
noncomputable def Nat.xor (_n _m : Nat) : Nat := 1
theorem defined (n m : Nat) : Eq (Nat.xor n m) 1 := Eq.refl 1
attribute [irreducible] Nat.xor
theorem computed : Eq (Nat.xor 1 1) 0 := Eq.refl 0
theorem t : False := Nat.one_is_not_zero (Eq.trans (Eq.symm (defined 1 1)) computed)
