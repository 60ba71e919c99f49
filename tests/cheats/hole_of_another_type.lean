prelude
import Core
def answer : Bool := true
theorem t : 17 + 17 = 34 := rfl
