prelude
import Core
set_option warn.sorry false
#versionexample : False := sorryAx False false
theorem t : True := True.intro
