prelude
import Core
mutual
inductive Even : Nat → Prop
  | zero : Even 0
  | succ (n : Nat) : Odd n → Even (Nat.succ n)
inductive Odd : Nat → Prop
  | succ (n : Nat) : Even n → Odd (Nat.succ n)
end
theorem t : Odd 1 := Odd.succ 0 Even.zero
