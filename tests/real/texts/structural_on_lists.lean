def zipSum : List Nat → List Nat → List Nat
  | x :: xs, y :: ys => (x + y) :: zipSum xs ys
  | _, _ => []

theorem zipSum_nil (xs : List Nat) : zipSum xs [] = [] := by
  cases xs <;> rfl

theorem zipSum_length (xs ys : List Nat) : (zipSum xs ys).length ≤ xs.length := by
  induction xs generalizing ys with
  | nil => simp [zipSum]
  | cons x xs ih =>
    cases ys with
    | nil => simp [zipSum]
    | cons y ys => simp [zipSum, ih ys]

-- accepted
-- states: zipSum_nil, zipSum_length
