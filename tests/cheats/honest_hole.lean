prelude
import Core
def answer : Nat := 8
theorem t : answer = 2 ^ 3 := rfl
