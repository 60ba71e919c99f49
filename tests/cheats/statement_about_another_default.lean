prelude
import Core
structure Start where
  n : Nat := 7
theorem t : ({} : Start).n = 7 := rfl
