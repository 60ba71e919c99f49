mutual
inductive Forest (α : Type) where
  | nil : Forest α
  | cons : Rose α → Forest α → Forest α
inductive Rose (α : Type) where
  | node : α → Forest α → Rose α
end

mutual
def Forest.size : Forest α → Nat
  | .nil => 0
  | .cons t ts => t.size + ts.size
def Rose.size : Rose α → Nat
  | .node _ ts => ts.size + 1
end

theorem Rose.size_pos (t : Rose α) : 0 < t.size := by
  cases t with
  | node x ts => simp [Rose.size]

-- accepted
-- states: Rose.size_pos
