module
import Std
meta import Lean.Elab

theorem hidden (a b : Nat) : min a b ≤ max a b := by omega

-- accepted
-- states: hidden
