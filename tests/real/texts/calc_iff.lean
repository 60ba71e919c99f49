theorem calc_props (p q r : Prop) (h : p ↔ q) : p ∧ r ↔ r ∧ q :=
  calc p ∧ r ↔ q ∧ r := and_congr h Iff.rfl
    _ ↔ r ∧ q := and_comm

-- accepted
-- states: calc_props
