theorem «a name with spaces» (p : Prop) (h : p) : p := h

theorem «∀-intro» (p : Nat → Prop) (h : ∀ n, p n) : p 0 := h 0

theorem αβγ' (h : 1 = 2) : False := by cases h

-- accepted
-- states: «a name with spaces», «∀-intro», αβγ'
