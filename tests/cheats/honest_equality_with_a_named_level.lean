prelude
set_option genCtorIdx false
inductive Eq : {α : Sort u} → α → α → Prop where | refl (a : α) : Eq a a
init_quot
theorem t {α : Sort v} (a : α) : Eq a a := Eq.refl a
