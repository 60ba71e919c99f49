theorem append_length (xs ys : List Nat) : (xs ++ ys).length = xs.length + ys.length := by simp

theorem map_map' (f g : Nat → Nat) (xs : List Nat) : (xs.map f).map g = xs.map (g ∘ f) := by simp

theorem reverse_twice (xs : List α) : xs.reverse.reverse = xs := by simp

-- accepted
-- states: append_length, map_map', reverse_twice
