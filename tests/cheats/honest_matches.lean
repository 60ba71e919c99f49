prelude
import Core
def f : Nat → Nat → Nat := fun a b => match a, b with | 0, y => y | Nat.succ x, _ => x
theorem t : f 0 3 = 3 := rfl
def double (n : Nat) : Nat := match n with | 0 => 0 | Nat.succ m => double m + 2
theorem t2 : double 5 = 10 := rfl
theorem t3 : ¬ 5 = 3 := by decide
def isTwo (n : Nat) : Bool := match n with | 2 => true | _ => false
theorem t4 : isTwo 2 = true := rfl
