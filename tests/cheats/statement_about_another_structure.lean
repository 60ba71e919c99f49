prelude
import Core
structure Pair where
  left : Nat
  right : Nat
theorem t (p : Pair) : p.1 = p.left := rfl
