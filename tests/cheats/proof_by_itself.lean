prelude
import Core
theorem t : False := t
