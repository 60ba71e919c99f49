prelude
import Core
variable (p q : Prop) (h : p)
include h
theorem t : p := by exact h
omit h
theorem u : q → q := fun h => h
