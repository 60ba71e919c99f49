prelude
import Core
axiom t (n m : Nat) : n + m = m + n
