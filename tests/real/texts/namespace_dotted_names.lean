def Nat.thrice (n : Nat) : Nat := n + n + n

theorem Nat.thrice_eq (n : Nat) : n.thrice = 3 * n := by
  unfold Nat.thrice
  omega

theorem List.thrice_head (n : Nat) : [n.thrice].head? = some n.thrice := rfl

-- accepted
-- states: Nat.thrice_eq, List.thrice_head
