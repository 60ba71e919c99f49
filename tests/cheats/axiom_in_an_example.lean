prelude
import Core
axiom cheat (p : Prop) : p
example : False := cheat False
