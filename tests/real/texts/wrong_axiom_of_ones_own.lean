axiom everything (p : Prop) : p

theorem false_thing : 1 = 2 := everything _

-- rejected forbidden_axiom
-- why: Lean accepts it; leanq allows no axiom that a text declares
