prelude
import Core
unsafe def bad : False := bad
set_option debug.skipKernelTC true
theorem t : False := bad
