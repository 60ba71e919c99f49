prelude
import Core
#version
theorem counterexample : True := True.intro
def external : Nat := 1
example : True := (counterexample)
theorem t : True ∧ True := ⟨counterexample, counterexample⟩
