prelude
import Core
theorem t : True := True.intro
/- theorem u : False := sorry