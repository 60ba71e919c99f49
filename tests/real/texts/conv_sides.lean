theorem conv_lhs (a b c : Nat) : a + b + c = b + a + c := by
  conv =>
    lhs
    arg 1
    rw [Nat.add_comm]

theorem conv_in (a b : Nat) : (fun x => x + (a + b)) = fun x => x + (b + a) := by
  conv =>
    lhs
    intro x
    rw [Nat.add_comm a b]

-- accepted
-- states: conv_lhs, conv_in
