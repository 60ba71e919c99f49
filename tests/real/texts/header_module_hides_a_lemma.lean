module
import Std.Data.HashMap

theorem same_key {α β} [BEq α] [Hashable α] [LawfulBEq α] (m : Std.HashMap.Raw α β) (a b : α)
    (h : a = b) (p : a ∈ m) : m.getKey a p = m.getKey b (h ▸ p) := by
  simp only [h]

-- accepted
-- states: same_key
