theorem impossible (p : Prop) (hp : p) (hn : ¬ p) : 1 = 2 := by contradiction

theorem absurd' (h : (3 : Nat) = 4) : False := by
  exact absurd h (by decide)

-- accepted
-- states: impossible, absurd'
