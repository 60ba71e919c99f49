prelude
import Core
axiom cheat : False
theorem t : False := cheat
