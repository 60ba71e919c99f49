universe w

inductive Vec (α : Type w) : Nat → Type w where
  | nil : Vec α 0
  | cons : α → Vec α n → Vec α (n + 1)

def Vec.map (f : α → β) : Vec α n → Vec β n
  | .nil => .nil
  | .cons x xs => .cons (f x) (xs.map f)

theorem Vec.map_id (xs : Vec α n) : xs.map id = xs := by
  induction xs with
  | nil => rfl
  | cons x xs ih => simp [Vec.map, ih]

-- accepted
-- states: Vec.map_id
