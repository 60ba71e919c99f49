prelude
import Core
#versionunsafe def f : False := f
theorem t : True := True.intro
