def revAppend : List α → List α → List α
  | [], ys => ys
  | x :: xs, ys => revAppend xs (x :: ys)

theorem revAppend_eq (xs ys : List α) : revAppend xs ys = xs.reverse ++ ys := by
  induction xs generalizing ys with
  | nil => rfl
  | cons x xs ih => simp [revAppend, ih]

-- accepted
-- states: revAppend_eq
