theorem witnesses : ∃ a b : Nat, a + b = 7 ∧ a < b := by
  refine ⟨3, 4, ?_, ?_⟩ <;> decide

theorem exists_tactic : ∃ n : Nat, n * n = 49 := by
  exists 7

-- accepted
-- states: witnesses, exists_tactic
