prelude
import Core
def t : True → True := fun _ => True.intro
