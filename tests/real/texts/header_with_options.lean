import Std
set_option autoImplicit false
set_option linter.unusedVariables false

theorem quiet (a b : Nat) (unused : a = b) : b = b := rfl

-- accepted
-- states: quiet
