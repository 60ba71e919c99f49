prelude
import Core
set_option sat.solver "/bin/sh"
theorem t : True := True.intro
