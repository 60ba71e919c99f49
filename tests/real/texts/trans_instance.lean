def Rel (a b : Nat) : Prop := ∃ k, b = a + k

instance : Trans Rel Rel Rel where
  trans := fun ⟨k, hk⟩ ⟨l, hl⟩ => ⟨k + l, by omega⟩

theorem through (a b c d : Nat) (h : Rel a b) (k : Rel b c) (l : Rel c d) : Rel a d :=
  calc Rel a b := h
    Rel _ c := k
    Rel _ d := l

-- accepted
-- states: through
