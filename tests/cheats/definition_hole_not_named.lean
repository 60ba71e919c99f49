prelude
import Core
def answer : Nat := 5
theorem t : answer = 5 := rfl
