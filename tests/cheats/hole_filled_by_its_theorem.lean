prelude
import Core
theorem help : True := True.intro
def answer : Prop := True
theorem t : answer := True.intro
