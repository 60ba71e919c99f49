import Std
set_option maxRecDepth 2000

theorem contextual (p q : Prop) : p → (q ↔ (p ∧ q)) := by
  simp +contextual

-- accepted
-- states: contextual
