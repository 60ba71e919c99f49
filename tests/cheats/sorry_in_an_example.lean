prelude
import Core
set_option warn.sorry false
theorem fine : True := True.intro
example : False := sorry
