prelude
import Tracing
theorem t : True := True.intro
def f (trace : Nat → Nat) (n : Nat) : Nat := (trace n)
