prelude
import Core
def double (n : Nat) : Nat := n + n
theorem easy : True := True.intro
