prelude
import Core
syntax "another" : term
theorem t : True := True.intro
