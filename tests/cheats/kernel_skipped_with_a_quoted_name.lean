prelude
import Core
unsafe def bad : False := bad
set_option «debug».«skipKernelTC» true in
theorem t : False := bad
