prelude
import Core
theorem t (α : Type) (r : α → α → Prop) (f : α → Nat) (h : ∀ a b, r a b → f a = f b) (a : α) :
    Quot.lift f h (Quot.mk r a) = f a := rfl
