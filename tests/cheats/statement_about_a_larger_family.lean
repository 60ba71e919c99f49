prelude
import Core
mutual
inductive Even : Nat → Prop
  | zero : Even 0
  | succ (n : Nat) : Odd n → Even (Nat.succ n)
inductive Odd : Nat → Prop
  | succ (n : Nat) : Even n → Odd (Nat.succ n)
  | all (n : Nat) : Odd n
end
theorem t : Odd 2 := Odd.all 2
