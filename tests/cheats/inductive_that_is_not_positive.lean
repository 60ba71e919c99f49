prelude
import Core
set_option debug.skipKernelTC true
inductive Bad where | mk (f : Bad → False) : Bad
