universe u v

def Pair' (α : Type u) (β : Type v) : Type (max u v) := α × β

theorem pair_fst {α : Type u} {β : Type v} (a : α) (b : β) : (a, b).1 = a := rfl

theorem lifted {α : Type u} (a : α) : (ULift.up.{v} a).down = a := rfl

-- accepted
-- states: pair_fst, lifted
