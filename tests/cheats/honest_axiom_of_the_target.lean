prelude
import Core
axiom assumed : ∀ n : Nat, n ≤ n * n
theorem t : 5 ≤ 5 * 5 := assumed 5
