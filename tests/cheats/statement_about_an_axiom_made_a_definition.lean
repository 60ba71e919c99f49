prelude
import Core
def assumed : Prop := True
theorem t : assumed := True.intro
