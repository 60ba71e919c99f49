prelude
import Core
def taken (_ : 1 + 1 = 2) : Nat := 5
theorem known : 1 + 1 = 2 := rfl
theorem other : 1 + 1 = 2 := known
def value : Nat := taken other
theorem t : value = 5 := rfl
