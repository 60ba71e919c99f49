prelude
import Core
def answer : Prop := ∀ n : Nat, n * 2 = 2 * n
theorem t : answer ↔ ∀ n : Nat, n * 2 = 2 * n := ⟨id, id⟩
