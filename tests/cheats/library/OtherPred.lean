/- A library that means something else by a name that the kernel does not know. -/
prelude
import Bare
protected noncomputable def Nat.pred (n : Nat) : Nat := n
