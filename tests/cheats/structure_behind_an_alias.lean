prelude
import Core
structure S where
  a : Nat
  h : False
def T : Type := S
theorem t : ∀ s : T, S.a s = 0 := fun s => False.elim (S.h s)
