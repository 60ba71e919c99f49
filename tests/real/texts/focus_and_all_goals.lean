theorem together (p q : Prop) (hp : p) (hq : q) : p ∧ q ∧ p := by
  and_intros
  all_goals assumption

theorem repeated : 1 ≤ 2 ∧ 2 ≤ 3 ∧ 3 ≤ 4 := by
  repeat' constructor
  all_goals decide

-- accepted
-- states: together, repeated
