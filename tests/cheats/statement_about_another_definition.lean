prelude
import Core
def double (_ : Nat) : Nat := 4
theorem t : double 3 = 4 := rfl
