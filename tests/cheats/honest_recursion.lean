prelude
import Core
def double : Nat → Nat
  | 0 => 0
  | Nat.succ n => Nat.succ (Nat.succ (double n))
theorem t : double 2 = 4 := rfl
