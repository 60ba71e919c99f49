prelude
import Core
structure Small where
  n : Nat
  h : ¬ n = 5
theorem small._proof_1 : ¬ 4 = 5 := by decide
def small : Small := ⟨4, small._proof_1⟩
theorem t : small.n = 4 := rfl
