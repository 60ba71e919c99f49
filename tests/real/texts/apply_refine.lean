theorem refine_parts (p q r : Prop) (hp : p) (hq : q) (hr : r) : p ∧ q ∧ r := by
  refine ⟨hp, ?_, ?_⟩
  · exact hq
  · exact hr

theorem apply_chain (p q r : Prop) (h : p → q) (k : q → r) (hp : p) : r := by
  apply k
  apply h
  exact hp

-- accepted
-- states: refine_parts, apply_chain
