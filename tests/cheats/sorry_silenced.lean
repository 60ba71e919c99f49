prelude
import Core
set_option warn.sorry false
theorem t : False := sorry
