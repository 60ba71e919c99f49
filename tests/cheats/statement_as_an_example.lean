prelude
import Core
example : True → True := fun _ => True.intro
