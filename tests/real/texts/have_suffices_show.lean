theorem steps (a b : Nat) (h : a = b + 1) : a ≠ 0 := by
  have k : 0 < a := by omega
  show a ≠ 0
  exact Nat.pos_iff_ne_zero.mp k

theorem sufficient (p q : Prop) (hq : q) (h : q → p) : p := by
  suffices hq' : q from h hq'
  exact hq

-- accepted
-- states: steps, sufficient
