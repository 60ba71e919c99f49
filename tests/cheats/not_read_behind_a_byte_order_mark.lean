prelude
import Core
theorem t : True := True.intro
