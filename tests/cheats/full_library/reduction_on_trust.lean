import Lean
def f : Bool := true
theorem t : f = true := Lean.ofReduceBool f true rfl
