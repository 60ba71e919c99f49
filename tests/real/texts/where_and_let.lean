def norm1 (x y : Int) : Nat := part x + part y
where
  part (z : Int) : Nat := z.natAbs

theorem norm1_zero : norm1 0 0 = 0 := rfl

theorem with_let (n : Nat) : (let m := n + 1; m) = n + 1 := rfl

-- accepted
-- states: norm1_zero, with_let
