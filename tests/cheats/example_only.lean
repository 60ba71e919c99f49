prelude
import Core
example : True := True.intro
