prelude
import Core
#versionsyntax "another" : term
theorem t : True := True.intro
