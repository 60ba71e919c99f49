prelude
import Core
structure Weird where
  value : Nat
@[instance] def one (n : Nat) : OfNat Weird n := ⟨⟨1⟩⟩
theorem t : (5 : Weird) = 3 := rfl
