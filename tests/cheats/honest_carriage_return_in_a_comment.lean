prelude
import Core
theorem fine : True := True.intro
-- a carriage returnexample : False := sorry
