prelude
import Tracing
def aesop (add : Nat) : Nat := add
def Aesop.RuleTac : Nat := aesop (add := 1)
theorem t : True := True.intro
