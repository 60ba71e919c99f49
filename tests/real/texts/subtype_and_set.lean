def Pos := { n : Nat // 0 < n }

theorem Pos.ne_zero (p : Pos) : p.val ≠ 0 := Nat.ne_of_gt p.property

def AllOf (p : Nat → Prop) (xs : List Nat) : Prop := ∀ x ∈ xs, p x

theorem AllOf.tail (h : AllOf p (x :: xs)) : AllOf p xs :=
  fun y hy => h y (List.mem_cons_of_mem x hy)

-- accepted
-- states: Pos.ne_zero, AllOf.tail
