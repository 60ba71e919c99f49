prelude
import Core
private theorem t : True → True := fun _ => True.intro
