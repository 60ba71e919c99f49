prelude
import Core
set_option warn.sorry false
example : True := True.intro
where
  t : False := sorryAx False true
