prelude
import Core
variable (h : False)
include h in
theorem t : False := h
