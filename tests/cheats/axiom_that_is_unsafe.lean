prelude
import Core
unsafe axiom cheat : False
unsafe def t : False := cheat
