import Lean
notation "⟪x" => True.intro
theorem t : True := ⟪xelab "shown" : command => pure ()
