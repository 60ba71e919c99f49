prelude
import Bare
noncomputable def Nat.ble (_n _m : Nat) : Bool := Bool.false
theorem defined (n m : Nat) : Eq (Nat.ble n m) Bool.false := Eq.refl Bool.false
attribute [irreducible] Nat.ble
theorem computed : Eq (Nat.ble 1 2) Bool.true := Eq.refl Bool.true
theorem t : False := Bool.true_is_not_false (Eq.trans (Eq.symm computed) (defined 1 2))
