prelude
import Core
opaque hidden : False := sorryAx False false
theorem t : False := hidden
