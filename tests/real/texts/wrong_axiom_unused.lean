axiom unused : 1 = 2

theorem true_thing : 1 = 1 := rfl

-- rejected forbidden_axiom
-- why: Lean accepts it; leanq allows no axiom that a text declares, used or not
