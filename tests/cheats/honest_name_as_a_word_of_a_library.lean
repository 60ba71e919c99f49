prelude
import Tracing
def Matrix.trace (n : Nat) : Nat := n
def f (traced : Nat) : Nat := traced
theorem t : f (traced := 1) = Matrix.trace 1 := rfl
