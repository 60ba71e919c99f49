theorem from_nothing (h : x ∈ ([] : List Nat)) : False := nomatch h

theorem fin_zero (x : Fin 0) : x = x := by
  exact x.elim0

-- accepted
-- states: from_nothing, fin_zero
