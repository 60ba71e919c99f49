prelude
import Core
theorem t : False := True.intro
