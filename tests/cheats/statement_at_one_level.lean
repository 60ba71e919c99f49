prelude
import Core
theorem t (α : Type) (a : α) : a = a := rfl
