import Lean
macro "Closed" rest:term* : term => `(True)
theorem t : Closed 1 2 := trivial
