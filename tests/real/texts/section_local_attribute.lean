theorem local_rule (n : Nat) : n * 1 + 0 = n := by simp

section
attribute [local simp] Nat.add_comm

theorem with_local (a b : Nat) : a + b = b + a := by simp
end

-- accepted
-- states: local_rule, with_local
