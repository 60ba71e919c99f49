inductive Even : Nat → Prop where
  | zero : Even 0
  | step : Even n → Even (n + 2)

theorem Even.add (h : Even m) (k : Even n) : Even (m + n) := by
  induction k with
  | zero => exact h
  | step _ ih => exact Even.step ih

theorem Even.double (n : Nat) : Even (n + n) := by
  induction n with
  | zero => exact Even.zero
  | succ n ih =>
    have e : n + 1 + (n + 1) = n + n + 2 := by omega
    rw [e]
    exact ih.step

-- accepted
-- states: Even.add, Even.double
