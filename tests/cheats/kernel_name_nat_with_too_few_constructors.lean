prelude
set_option genCtorIdx false
inductive False : Prop
inductive Nat where | zero : Nat
