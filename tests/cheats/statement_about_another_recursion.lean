prelude
import Core
def double : Nat → Nat
  | 0 => 1
  | Nat.succ n => Nat.succ (Nat.succ (double n))
theorem t : double 2 = 5 := rfl
