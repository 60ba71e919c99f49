theorem chain (p q r : Prop) (hp : p) (hpq : p → q) (hqr : q → r) : r := by simp_all

theorem same (a b : Nat) (h : a = b) (hb : b = 3) : a + 1 = 4 := by simp_all

-- accepted
-- states: chain, same
