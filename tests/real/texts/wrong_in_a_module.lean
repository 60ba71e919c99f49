module
import Std

theorem false_in_a_module (a b : Nat) : a + b = a := by omega

-- rejected lean_error
