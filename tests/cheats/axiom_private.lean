prelude
import Core
private axiom cheat : False
theorem t : False := cheat
