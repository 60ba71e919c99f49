theorem term_sorry (p q : Prop) (hp : p) : p ∧ (q ∨ p) := ⟨hp, sorry⟩

-- incomplete sorry
-- states: term_sorry
