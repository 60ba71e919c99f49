prelude
import Core
theorem t : Nat := 5
