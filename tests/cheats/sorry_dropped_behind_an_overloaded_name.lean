prelude
import Core
def A.amb (x : Nat) : Nat := x
def B.amb (x : Bool) : Nat := Nat.zero
open A B
mutual
theorem t : 1 = 2 := missing
theorem u : Nat.succ (amb (sorryAx True true)) := missing
end
theorem fine : True := True.intro
