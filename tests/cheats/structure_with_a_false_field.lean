prelude
import Core
structure Context where
  absurd : False
theorem t (c : Context) : False := c.absurd
