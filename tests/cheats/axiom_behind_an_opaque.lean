prelude
import Core
axiom cheat : False
opaque hidden : False := cheat
theorem t : False := hidden
