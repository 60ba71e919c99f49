-- Proves the target's theorem behind lemmas and definitions that the target lacks.
prelude
import Core
def double (n : Nat) : Nat := n + n
theorem help : double 2 = 4 := rfl
theorem t : double 3 = 6 := rfl
