prelude
import Core
def double (n : Nat) : Nat := n + n
theorem double._x : double 2 = 4 := rfl
theorem double.match_1 : double 3 = 6 := rfl
