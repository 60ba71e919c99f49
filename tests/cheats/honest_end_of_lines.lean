prelude
import Core
theorem t (p : Prop) (h : p) : p := by
  exact h
-- Carriage returns stand before each end of a line.
example : True := True.intro
