def count : List Nat → Nat
  | [] => 0
  | _ :: xs => count xs + 1

theorem count_append (xs ys : List Nat) : count (xs ++ ys) = count xs + count ys := by
  cases xs with
  | nil => simp [count]
  | cons x xs => simp [count, ih]

-- rejected lean_error
