prelude
import Core
example (n : Nat) : n = n := t n
where
  t (n : Nat) : n = n := rfl
example : True := True.intro
where
  unused (n : Nat) : n = n := rfl
