prelude
import Core
def fast (_ : Nat) : Nat := 1
@[implemented_by fast] def slow (_ : Nat) : Nat := 2
theorem t : slow 1 = 2 := rfl
