prelude
import Core
/- theorem t : False := by decide -/
theorem s : True := True.intro
