prelude
import Core
def taken (_ : 1 + 1 = 2) : Nat := 5
theorem known : 1 + 1 = 2 := rfl
def value : Nat := taken known
theorem t : value = 5 := rfl
