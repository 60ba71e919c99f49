def firstOr (xs : Array Nat) (d : Nat) : Nat := if h : 0 < xs.size then xs[0] else d

theorem firstOr_empty (d : Nat) : firstOr #[] d = d := rfl

theorem get_index (xs : List Nat) (h : 0 < xs.length) : xs[0]'h ∈ xs := by simp

-- accepted
-- states: firstOr_empty, get_index
