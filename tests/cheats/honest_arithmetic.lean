-- Computes, compares and decides with what the kernel knows.
prelude
import Core
theorem t : 5 - 3 = 2 ∧ 2 ^ 10 = 1024 ∧ 17 % 5 = 2 := ⟨rfl, rfl, rfl⟩
theorem big : 2 ^ 200 / 2 ^ 199 = 2 := rfl
theorem less : 3 ≤ 5 ∧ ¬ 5 < 3 := by decide
