local infixl:65 " ⊞ " => fun (a b : Nat) => a + b
theorem aux (a b : Nat) : a ⊞ b = b ⊞ a := Nat.add_comm a b
theorem t (a b : Nat) : a + b = b + a := aux a b
