prelude
import Tracing
def rule : Nat := 1
-- @[aesop safe] rule: Aesop.RuleTac
theorem t : True := True.intro
