prelude
import Bare
set_option genCtorIdx false
inductive String : Type
theorem t : False := String.rec (motive := fun _ => False) "any"
