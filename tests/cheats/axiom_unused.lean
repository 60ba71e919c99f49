prelude
import Core
axiom cheat : False
theorem fine : True := True.intro
