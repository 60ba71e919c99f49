prelude
import Core
axiom assumed : False
theorem t : True ∧ False := assumed.elim
