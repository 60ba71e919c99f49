prelude
set_option genCtorIdx false
inductive Quot : Prop where | mk : Quot
theorem fine : Quot := Quot.mk
