prelude
import Core
def f : Nat := 1
#versionattribute [export lean_f] f
theorem t : True := True.intro
