prelude
import Core
axiom answer : Nat
theorem t : 17 + 17 = 34 := rfl
