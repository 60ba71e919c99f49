prelude
import Bare
noncomputable def Nat.beq (_n _m : Nat) : Bool := Bool.false
theorem defined (n m : Nat) : Eq (Nat.beq n m) Bool.false := Eq.refl Bool.false
attribute [irreducible] Nat.beq
theorem computed : Eq (Nat.beq 1 1) Bool.true := Eq.refl Bool.true
theorem t : False := Bool.true_is_not_false (Eq.trans (Eq.symm computed) (defined 1 1))
