prelude
import Core
theorem t.{v} (α : Sort v) (a : α) : a = a := rfl
