def count : Nat → Nat
  | 0 => 0
  | n + 1 => count n + 1

theorem too_deep : count 5000 = 5000 := rfl

-- exhausted recursion_depth
