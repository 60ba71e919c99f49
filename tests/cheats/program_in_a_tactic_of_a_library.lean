prelude
import Tracing
theorem t : True := True.intro
-- theorem u : True := by trace 1
