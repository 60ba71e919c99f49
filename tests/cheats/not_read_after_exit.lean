prelude
import Core
theorem fine : True := True.intro
#exit
theorem t : False := True.intro
