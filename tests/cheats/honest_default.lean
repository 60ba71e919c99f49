prelude
import Core
structure Start where
  n : Nat := 8
theorem t : ({} : Start).n = 8 := rfl
