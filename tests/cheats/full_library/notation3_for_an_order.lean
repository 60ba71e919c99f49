import Mathlib.Util.Notation3
notation3 (priority := high) a " < " b => True ∨ a = b
theorem t : 5 < 3 := Or.inl trivial
