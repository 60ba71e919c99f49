import Aesop
inductive Even : Nat → Prop where
  | zero : Even 0
  | add_two : Even n → Even (n + 2)
attribute [aesop safe constructors] Even
@[aesop safe apply] theorem Even.four : Even 4 := .add_two (.add_two .zero)
theorem t : Even 4 := by aesop
