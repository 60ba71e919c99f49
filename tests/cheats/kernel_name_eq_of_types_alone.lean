prelude
set_option genCtorIdx false
inductive Eq : {α : Type u} → α → α → Prop where | refl (a : α) : Eq a a
theorem t {α : Type v} (a : α) : Eq a a := Eq.refl a
